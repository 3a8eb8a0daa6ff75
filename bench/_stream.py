"""One streamed request to an OpenAI-compatible server, with the times at which its text came.

Knows what vLLM, SGLang, llama.cpp and Outrider have in common, and where each tells how many drafts were accepted.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import httpx

from bench._prompts import Prompt

# What a delta's text comes as; vLLM's newer versions say reasoning where its older ones and others add _content.
_TEXTS = ("content", "reasoning", "reasoning_content", "tool_calls")
_GIVEN_UP = ("abort", "error")  # finish reasons of vLLM and SGLang, whose answers are no whole ones
_OF_EVENTS = (b"data:", b"event:", b"id:", b"retry:", b":")  # how a line of an event stream may begin
_HEAD_BYTES = 500  # of what is no answer, to be shown


class ServerRefused(Exception):
    """The server answered with an error, or ended a stream without saying how many tokens it held."""


@dataclass(frozen=True)
class Asked:
    """What every request of a run has in common. `extra` goes into the body as it is."""

    model: str
    max_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """The JSON body; `ignore_eos` is not OpenAI's, but all four servers have it."""
        what = {"prompt": list(prompt.ids)} if prompt.ids else {"messages": list(prompt.messages)}
        return {
            "model": self.model, **what, "max_tokens": self.max_tokens, "temperature": self.temperature,
            "stream": True, "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}), **self.extra,
        }  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """One finished request. Times are seconds of the same monotonic clock; token counts are the server's own.

    `chunk_times` are those of the events that brought text, `ended` that of the event with the finish reason.
    `verify_steps` is the number of steps that committed all tokens but the first, None where the server does not tell.
    """

    prompt: Prompt
    sent: float
    chunk_times: tuple[float, ...]
    ended: float
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    verify_steps: int | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds to the first text; to the end, where there was none."""
        return (self.chunk_times[0] if self.chunk_times else self.ended) - self.sent

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last."""
        return self.ended - self.chunk_times[0] if self.chunk_times else 0.0

    @property
    def inter_token_s(self) -> list[float]:
        """The time between each token and the one before it: completion_tokens - 1 values.

        Tokens that came in one event came at once, so beside the gaps between events all others are zero.
        """
        num_gaps = max(self.completion_tokens - 1, 0)
        gaps = self.gaps_s[:num_gaps]
        return gaps + [0.0] * (num_gaps - len(gaps))

    @property
    def gaps_s(self) -> list[float]:
        """The time between each event with text and the one before it."""
        return [later - earlier for earlier, later in zip(self.chunk_times, self.chunk_times[1:], strict=False)]


async def ask(client: httpx.AsyncClient, prompt: Prompt, asked: Asked) -> Answer:
    """Sends one request and reads its stream to the end. ServerRefused for an error."""
    route = "/v1/completions" if prompt.ids else "/v1/chat/completions"
    heard = Heard(route)
    sent = time.perf_counter()
    async with client.stream("POST", route, json=asked.body(prompt)) as response:
        if response.status_code != 200:
            raise refusal(route, response.status_code, await response.aread())
        async for piece in response.aiter_bytes():
            heard.take(piece)
    heard.check()
    return Answer(
        prompt, sent, tuple(heard.chunk_times), heard.ended, *heard.token_counts, heard.finish_reason,
        heard.verify_steps,
    )  # fmt: skip


@dataclass
class Heard:
    """A stream's text so far, for who takes its bytes as they come. Times are those of Answer.

    ServerRefused for what is no answer: an error, one that was given up, a stream that ends too early.
    """

    route: str
    text: str = ""
    chunk_times: list[float] = field(default_factory=list)
    ended: float = 0.0
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    verify_steps: int | None = None
    _head: bytes = b""  # the first bytes, while there is no event
    _rest: bytes = b""
    _told: bool = False  # any event
    _done: bool = False

    def take(self, piece: bytes) -> None:
        """Takes some bytes more."""
        *lines, self._rest = (self._rest + piece).split(b"\n")  # text may hold what else ends lines
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data.startswith(b"{"):
                self._take_event(_event(data), time.perf_counter())
            self._done |= data == b"[DONE]"
        if not self._told:
            self._head = (self._head + piece)[:_HEAD_BYTES]

    def _take_event(self, event: dict[str, Any], now: float) -> None:
        self._told = True
        if event.get("error") is not None:
            raise ServerRefused(f"{self.route}: {event['error']}")
        self.usage = _object(event.get("usage"), "usage") or self.usage
        told = _verify_steps(event)
        self.verify_steps = self.verify_steps if told is None else told
        for choice in _choices(event):
            if _has_text(choice):
                self.chunk_times.append(now)
                self.text += _content(choice)
            if choice.get("finish_reason"):
                self.ended, self.finish_reason = now, str(choice["finish_reason"])

    def check(self) -> None:
        """Checks, at the end of the stream, that it was an answer."""
        if self.finish_reason in _GIVEN_UP:
            raise ServerRefused(f"{self.route}: the server gave an answer up, with finish_reason {self.finish_reason}")
        if self.ended and self.usage:
            return
        if not self._told and self._head.strip() and not self._head.lstrip().startswith(_OF_EVENTS):
            raise ServerRefused(f"{self.route}: what came is no stream of events: {_shown(self._head)}")
        if not self._done and not self.ended:
            raise ServerRefused(f"{self.route}: the stream broke off after {len(self.chunk_times)} events with text")
        raise ServerRefused(f"{self.route}: the stream ended without its {'finish reason' if self.usage else 'usage'}")

    @property
    def token_counts(self) -> tuple[int, int]:
        """Tokens of the prompt and of the answer, as the server's usage has them."""
        return _count(self.usage, "prompt_tokens"), _count(self.usage, "completion_tokens")


def refusal(route: str, status: int, body: bytes) -> ServerRefused:
    """The error of an answer that is one, in a line."""
    if status == 401:
        return ServerRefused(f"{route}: HTTP 401: the server wants a key that it knows; --api-key gives one")
    return ServerRefused(f"{route}: HTTP {status}: {_shown(body[:_HEAD_BYTES])}")


def _shown(body: bytes) -> str:
    return " ".join(body.decode(errors="replace").split())


def _count(usage: dict[str, Any], name: str) -> int:
    value = usage.get(name)
    if not _is_count(value):
        raise ServerRefused(f"the server's usage has {name} {value!r}, which is no count")
    return value


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _object(value: object, name: str) -> dict[str, Any]:
    """The object called `name`; empty where there is none."""
    if not isinstance(value, dict | None):
        raise ServerRefused(f"an event's {name} is no object: {str(value)[:200]}")
    return value or {}


def _choices(event: dict[str, Any]) -> list[dict[str, Any]]:
    choices = event.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise ServerRefused(f"an event's choices are no objects: {str(choices)[:200]}")
    return choices


def _event(data: bytes) -> dict[str, Any]:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ServerRefused(f"an event is no JSON: {error}") from error


def _content(choice: dict[str, Any]) -> str:
    """The text for the user."""
    said = choice.get("text") or _object(choice.get("delta"), "delta").get("content")
    return said if isinstance(said, str) else ""


def _has_text(choice: dict[str, Any]) -> bool:
    return bool(choice.get("text")) or any(map(_object(choice.get("delta"), "delta").get, _TEXTS))


def _verify_steps(event: dict[str, Any]) -> int | None:
    """Steps of the target as this event tells them: Outrider's in its usage, llama.cpp's by its timings. None where it
    tells none, or in another shape."""
    match event:
        case {"usage": {"speculation": {"verify_steps": steps}}} if _is_count(steps):
            return steps
        case {"timings": {"predicted_n": made, "draft_n_accepted": hits}} if _is_count(made) and _is_count(hits):
            # The first token is the prompt's; then each step commits what it accepts and one token of the target's own.
            return max(0, made - 1 - hits)
        case _:
            return None
