"""transformers' greedy `generate` as an OpenAI-compatible server, one request at a time; for `bench peers` only.

python -m bench._transformers_server MODEL_FOLDER PORT
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer


class TokenQueue(BaseStreamer):
    """Hands each generated token to the event loop as it comes; None at the end."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[int | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._seen_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """The first call is the prompt."""
        if self._seen_prompt:
            self._loop.call_soon_threadsafe(self.queue.put_nowait, int(value.reshape(-1)[0]))
        self._seen_prompt = True

    def end(self) -> None:
        """Notes that generation is over."""
        self._loop.call_soon_threadsafe(self.queue.put_nowait, None)


class Server:
    """The routes that a load generator needs."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
        self._model = model.eval()
        self._one_at_a_time = asyncio.Lock()

    def app(self) -> Starlette:
        """The application."""
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
            ]
        )

    async def _health(self, request: Request) -> Response:
        return Response()

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": self._folder}]})

    async def _complete(self, request: Request) -> Response:
        return StreamingResponse(self._stream(await request.json()), media_type="text/event-stream")

    def _prompt(self, body: dict[str, Any]) -> torch.Tensor:
        if "prompt" in body:
            return torch.tensor([body["prompt"]])
        return self._tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        async with self._one_at_a_time:
            prompt = self._prompt(body)
            tokens = TokenQueue()
            task = asyncio.create_task(asyncio.to_thread(self._generate, prompt, body, tokens))
            count, last = 0, -1
            while (token := await tokens.queue.get()) is not None:
                count, last = count + 1, token
                # As many events as tokens; what the text is matters to nobody.
                yield _event(choices=[{"index": 0, "delta": {"content": "."}, "text": ".", "finish_reason": None}])
            await task
        reason = "stop" if last == self._tokenizer.eos_token_id else "length"
        yield _event(choices=[{"index": 0, "delta": {}, "text": "", "finish_reason": reason}])
        yield _event(choices=[], usage={"prompt_tokens": prompt.shape[1], "completion_tokens": count})
        yield "data: [DONE]\n\n"

    def _generate(self, prompt: torch.Tensor, body: dict[str, Any], tokens: TokenQueue) -> None:
        ends = {"eos_token_id": None} if body.get("ignore_eos") else {}
        try:
            with torch.inference_mode():
                self._model.generate(
                    prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=body["max_tokens"],
                    pad_token_id=self._tokenizer.eos_token_id, streamer=tokens, **ends,
                )  # fmt: skip
        except BaseException:
            tokens.end()
            raise


def _event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


if __name__ == "__main__":
    uvicorn.run(Server(sys.argv[1]).app(), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
