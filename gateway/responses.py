"""Answers as types, and the chunks of a stream as bytes.

A chunk differs from the one before in its text alone, so everything around it is encoded once per request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from gateway.answer import Answer
from gateway.text_stream import Delta, SpeculationCount, total_speculation

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


class SpeculationUsage(Struct):
    """What speculation did for a request. `accept_length` is tokens committed per verify step."""

    verify_steps: int
    draft_tokens: int
    accepted_tokens: int
    accept_length: float | None

    @classmethod
    def of(cls, count: SpeculationCount) -> SpeculationUsage:
        """From the counts of its choices."""
        return cls(count.verify_steps, count.draft_tokens, count.accepted_tokens, count.accept_length)


class PromptTokensDetails(Struct):
    """Where a prompt's tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """What became of a `prediction`."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Struct):
    """Exact counts. `completion_tokens` are those emitted, up to the one that completed a stop string."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    speculation: SpeculationUsage
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @classmethod
    def of(cls, answers: Sequence[Answer], *, predicted: bool = False) -> Usage:
        """Of one HTTP request: each prompt counts once, whatever its number of choices."""
        prompt = sum(answer.prompt_len for answer in answers)
        completion = sum(answer.completion_tokens for answer in answers)
        count = total_speculation(answer.speculation for answer in answers)
        details = CompletionTokensDetails(count.accepted_prediction_tokens, count.rejected_prediction_tokens)
        return cls(
            prompt, completion, prompt + completion,
            PromptTokensDetails(sum(answer.cached_tokens for answer in answers)),
            SpeculationUsage.of(count),
            details if predicted else UNSET,
        )  # fmt: skip


class AssistantMessage(Struct):
    """The message of a chat answer."""

    content: str
    role: str = "assistant"
    refusal: str | None = None


class ChatChoice(Struct):
    """One answer to a chat."""

    index: int
    message: AssistantMessage
    finish_reason: str
    logprobs: None = None


class ChatCompletion(Struct):
    """The answer of POST /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None
    object: str = "chat.completion"


class TextChoice(Struct):
    """One continuation of a prompt."""

    index: int
    text: str
    finish_reason: str
    logprobs: None = None


class Completion(Struct):
    """The answer of POST /v1/completions."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    system_fingerprint: str | None
    object: str = "text_completion"


class ModelCard(Struct):
    """One entry of /v1/models."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "outrider"


class ModelList(Struct):
    """The answer of GET /v1/models."""

    data: list[ModelCard]
    object: str = "list"


class Chunks:
    """Writes a stream's events: `text` and `end` per choice, `usage` once. Everything fixed is encoded on creation."""

    def __init__(
        self, kind: str, *, id: str, created: int, model: str, fingerprint: str | None, include_usage: bool
    ) -> None:
        head = {"id": id, "object": kind, "created": created, "model": model, "system_fingerprint": fingerprint}
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._usage = b',"usage":null' if include_usage else b""
        self._tail = self._usage + b"}\n\n"

    def _event(self, choice: bytes, origins: Iterable[tuple[str, str]] | None) -> bytes:
        if origins is None:
            return b"".join((self._head, choice, b"]", self._tail))
        tokens = [{"text": text, "origin": origin} for text, origin in origins]
        return b"".join((self._head, choice, b'],"outrider":', _encode({"tokens": tokens}), self._tail))

    def usage(self, usage: Usage) -> bytes:
        """The chunk without choices that `include_usage` asks for."""
        return b"".join((self._head, b'],"usage":', _encode(usage), b"}\n\n"))


class ChatChunks(Chunks):
    """Chunks of a chat: the role first, then text, then the finish reason alone."""

    def __init__(self, **head: Any) -> None:
        super().__init__("chat.completion.chunk", **head)
        self._begun: set[int] = set()

    def events(self, delta: Delta) -> bytes:
        """Every event that a delta makes; none for tokens whose text is held back."""
        made: list[bytes] = []
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            made.append(self._event(self._choice(delta.choice, b'{"role":"assistant","content":""}', b"null"), None))
        if delta.text:
            content = b'{"content":' + _encode(delta.text) + b"}"
            made.append(self._event(self._choice(delta.choice, content, b"null"), delta.origins))
        if delta.finish_reason is not None:
            made.append(self._event(self._choice(delta.choice, b"{}", _encode(delta.finish_reason)), None))
        return b"".join(made)

    @staticmethod
    def _choice(index: int, delta: bytes, finish_reason: bytes) -> bytes:
        return b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":%b}' % (index, delta, finish_reason)


class CompletionChunks(Chunks):
    """Chunks of a plain completion."""

    def __init__(self, **head: Any) -> None:
        super().__init__("text_completion", **head)

    def events(self, index: int, delta: Delta) -> bytes:
        """The event of a delta; none when it neither adds text nor ends."""
        if not delta.text and delta.finish_reason is None:
            return b""
        return self._event(self._choice(index, delta.text, delta.finish_reason), delta.origins)

    def echo(self, index: int, text: str) -> bytes:
        """The prompt itself, in front of its continuation."""
        return self._event(self._choice(index, text, None), None)

    @staticmethod
    def _choice(index: int, text: str, finish_reason: str | None) -> bytes:
        return b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b}' % (
            index,
            _encode(text),
            _encode(finish_reason),
        )
