"""With generation_config.json's values for what a request leaves out, answers are those of `generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from gateway.app import create_app
from outrider.args import GatewayArgs
from tests.e2e.pair import drafter_of, running
from tests.e2e.small_model import write_small_model
from tests.gateway import models
from tests.gateway.fakes import FAST_PROBE, is_ready
from tests.polling import until_async

MOST = 48
MESSAGES = [{"role": "user", "content": "How are you today?"}]
PROMPT = "<|im_start|>user\nHow are you today?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.asyncio
async def test_greedy_answers_are_those_of_generate(tmp_path: Path) -> None:
    target = write_small_model(tmp_path)
    config = target / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"repetition_penalty": 1.3}))
    tokenizer = models.byte_level()
    model: Any = AutoModelForCausalLM.from_pretrained(target)
    prompt = tokenizer.encode(PROMPT).ids

    def generated(**settings: Any) -> list[int]:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MOST, pad_token_id=0, **settings
        )
        return made[0, len(prompt) :].tolist()

    penalised, plain = generated(), generated(repetition_penalty=1.0)
    assert penalised != plain
    text = tokenizer.decode(penalised)
    async with running(target) as pair, pair.drafting(drafter_of(target, "NGRAM")):
        app = create_app(GatewayArgs(verify_address=(pair.address,), metrics_port=None), probe=FAST_PROBE)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://x") as http,
        ):
            await until_async(lambda: is_ready(app.state.gateway), "the gateway is not ready", pause_s=0)

            async def ask(path: str, **body: Any) -> Any:
                reply = await http.post(path, json=body)
                assert reply.status_code == 200, reply.text
                return reply.json()

            asked: dict[str, Any] = {"max_new_tokens": MOST, "temperature": 0}
            native = await ask("/generate", input_ids=prompt, sampling_params=asked)
            assert native["output_ids"] == penalised
            asked["repetition_penalty"] = 1.0
            assert (await ask("/generate", input_ids=prompt, sampling_params=asked))["output_ids"] == plain
            greedy: dict[str, Any] = {"max_tokens": MOST, "temperature": 0}
            assert (await ask("/v1/completions", prompt=prompt, **greedy))["choices"][0]["text"] == text
            chat = await ask("/v1/chat/completions", messages=MESSAGES, **greedy)
            assert chat["choices"][0]["message"]["content"] == text
            made = await ask("/v1/responses", input=MESSAGES, max_output_tokens=MOST, temperature=0)
            assert made["output"][0]["content"][0]["text"] == text
