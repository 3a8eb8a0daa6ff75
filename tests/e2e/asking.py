"""Questions of every kind to a gateway, and the answers without the parts that may differ from time to time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

CHAT, COMPLETIONS, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 6, "maxItems": 8},
        "counts": {"type": "array", "items": {"type": "integer"}, "minItems": 8, "maxItems": 12},
    },
    "required": ["names", "counts"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks up.", "parameters": SCHEMA}}


class Lost(Exception):
    """No whole answer came: an error status, an error event, a stream without its end."""


@dataclass(frozen=True)
class Question:
    """A request's body."""

    name: str
    path: str
    body: dict[str, Any]


@dataclass
class Choice:
    """The whole content of one choice."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)  # name and arguments
    finish: Any = None


@dataclass
class Said:
    """An answer: its choices by index, and the usage."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: tuple[int, int] | None = None  # tokens of prompt and answer

    def choice(self, index: int) -> Choice:
        """The choice of that index."""
        return self.choices.setdefault(index, Choice())


def chat(name: str, text: str, max_tokens: int, **body: Any) -> Question:
    """A chat of one turn."""
    messages = [{"role": "user", "content": text}]
    return Question(name, CHAT, {"messages": messages, "max_tokens": max_tokens, **body})


def every_kind(max_tokens: int) -> list[Question]:
    """Greedy and sampled questions, with stops, grammars, tools, logprobs, choices; each whole and streamed."""
    free = {"ignore_eos": True}
    sampled = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
    kinds = [
        chat("greedy", "Hello there", max_tokens, temperature=0, **free),
        chat("sampled", "The quick brown fox", max_tokens, **sampled, **free),
        chat("penalised", "How are you", max_tokens, **sampled, frequency_penalty=0.3, presence_penalty=0.2, **free),
        chat("stops", "over the lazy dog", max_tokens, temperature=0.8, seed=12, stop=["two wordstwo", "never said"]),
        chat("logprobs", "naive cafe", max_tokens, **sampled, logprobs=True, top_logprobs=3, **free),
        chat("choices", "print(add(1, 2))", max_tokens // 2, **sampled, n=2, **free),
        chat(
            "schema", "Fill it in", max_tokens, **sampled,
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
        ),
        chat("tools", "Call it", max_tokens, **sampled, tools=[TOOL], tool_choice="required"),
        Question("completion", COMPLETIONS, {"prompt": "def add", "max_tokens": max_tokens, **sampled, **free}),
        Question(
            "native", NATIVE,
            {
                "text": "today",
                "sampling_params": {"temperature": 0.7, "sampling_seed": 5, "max_new_tokens": max_tokens, **free},
            },
        ),
    ]  # fmt: skip
    return [streamed for kind in kinds for streamed in (kind, _streamed(kind))]


def _streamed(question: Question) -> Question:
    body = {**question.body, "stream": True}
    if question.path != NATIVE:
        body["stream_options"] = {"include_usage": True}
    return Question(f"{question.name}, streamed", question.path, body)


async def ask(client: httpx.AsyncClient, question: Question, on_event: Callable[[], object] = bool) -> Said:
    """The whole answer. `on_event` is called with each event of a streamed one. Raises Lost."""
    try:
        if not question.body.get("stream"):
            response = await client.post(question.path, json=question.body)
            if response.status_code != 200:
                raise Lost(f"{question.name}: {response.status_code} {response.text}")
            return _whole(question, response.json())
        async with client.stream("POST", question.path, json=question.body) as response:
            if response.status_code != 200:
                raise Lost(f"{question.name}: {response.status_code} {await response.aread()!r}")
            return await _events(question, response, on_event)
    except httpx.HTTPError as error:
        raise Lost(f"{question.name}: {error!r}") from error


async def _events(question: Question, response: httpx.Response, on_event: Callable[[], object]) -> Said:
    said = Said()
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return said
        if not line.startswith("data: "):
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise Lost(f"{question.name}: {event}")
        if question.path == NATIVE:
            said = _whole(question, event)  # each has all so far
        else:
            _take_chunk(said, event)
        on_event()
    raise Lost(f"{question.name}: the stream has no end")


def _take_chunk(said: Said, event: dict[str, Any]) -> None:
    _take_usage(said, event.get("usage"))
    for part in event["choices"]:
        choice = said.choice(part["index"])
        assert choice.finish is None, "a choice goes on after its end"
        choice.finish = part["finish_reason"]
        delta = part.get("delta", part)
        choice.text += delta.get("content") or delta.get("text") or ""
        choice.logprobs += (part.get("logprobs") or {}).get("content") or []
        for call in delta.get("tool_calls") or []:
            known = choice.calls.setdefault(call["index"], ["", ""])
            known[0] += call["function"].get("name") or ""
            known[1] += call["function"].get("arguments") or ""


def _whole(question: Question, body: dict[str, Any]) -> Said:
    said = Said()
    if question.path == NATIVE:
        meta = body["meta_info"]
        said.usage = meta["prompt_tokens"], meta["completion_tokens"]
        said.choices[0] = Choice(body["text"], body["output_ids"], finish=meta["finish_reason"])
        return said
    _take_usage(said, body["usage"])
    for part in body["choices"]:
        message = part.get("message", part)
        said.choices[part["index"]] = Choice(
            message.get("content") or message.get("text") or "",
            logprobs=(part.get("logprobs") or {}).get("content") or [],
            calls={
                index: [call["function"]["name"], call["function"]["arguments"]]
                for index, call in enumerate(message.get("tool_calls") or [])
            },
            finish=part["finish_reason"],
        )
    return said


def _take_usage(said: Said, usage: dict[str, Any] | None) -> None:
    if usage is not None:
        said.usage = usage["prompt_tokens"], usage["completion_tokens"]
