"""POST /v1/responses, without state: each request carries all that it refers to."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from gateway.chat import Chat, begin_chat
from gateway.chunks import Extension, extension_of
from gateway.exchange import event_stream, json_response, request_id
from gateway.logprobs import logprobs_cost
from gateway.message import Message
from gateway.message_parts import CallBegin
from gateway.offload import offload
from gateway.responses_input import NAMES, as_chat, in_its_words, wants_logprobs
from gateway.responses_output import Event, Transcript
from gateway.responses_schemas import (
    IncompleteDetails,
    ResponseObject,
    ResponsesRequest,
    ResponsesUsage,
    TextFormat,
    TextOptions,
)
from gateway.responses_tools import RequestTools, read_tools
from gateway.service import gateway_of
from gateway.text_stream import Delta
from outrider.errors import OutriderError


async def responses(request: Request) -> ASGIApp:
    """Answers POST /v1/responses: reads it as a chat, and answers in items."""
    gateway = gateway_of(request)
    body = await gateway.read(request, ResponsesRequest)
    ready = gateway.ready_for(body.model)
    id = f"resp_{request_id(request)}"
    leave_out = gateway.decoder.leave_out
    tools = read_tools(body, leave_out)
    try:
        chat = await begin_chat(gateway, as_chat(body, tools, leave_out), ready, id, request, NAMES)
    except OutriderError as error:
        raise in_its_words(error, tools) from error
    run = _Run(body, tools, chat)
    if body.stream:
        return event_stream(request, run.events())
    whole = await run.collect()
    return await offload(run.cost(), json_response, whole)


@dataclass(slots=True)
class _Run:
    """One response on its way."""

    body: ResponsesRequest
    tools: RequestTools
    chat: Chat
    created_at: int = field(default_factory=lambda: int(time.time()))
    message: Message = field(init=False)
    transcript: Transcript = field(init=False)
    extension: Extension = field(init=False)
    num_events: int = 0

    def __post_init__(self) -> None:
        (self.message,) = self.chat.messages()
        self.transcript = Transcript(
            self.chat.ready.codec.piece, logprobs=wants_logprobs(self.body), namespaced=self.tools.namespaced
        )
        self.extension = extension_of(self.chat.body.speculative, self.chat.ready.codec.piece)

    async def collect(self) -> ResponseObject:
        """The whole response."""
        async with contextlib.aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                for _ in self._step(delta):
                    pass
        return self.response(done=True)

    async def events(self) -> AsyncGenerator[bytes]:
        """The events of the stream. It begins with the first tokens, and ends with the event that has the whole
        response."""
        async with contextlib.aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                yield self._beginning() + b"".join(map(self._encode, self._step(delta))) + self._told(delta)
        whole = self.response(done=True)
        yield await offload(self.cost(), self._encode, {"type": f"response.{whole.status}", "response": whole})

    def cost(self) -> int:
        """What `offload` takes it to cost to write the whole response."""
        return logprobs_cost(self.chat.answer, self.body.top_logprobs or 0) if wants_logprobs(self.body) else 0

    def _beginning(self) -> bytes:
        """The two events before all others, once."""
        if self.num_events:
            return b""
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._encode({"type": kind, "response": self.response(done=False)}) for kind in kinds)

    def _told(self, delta: Delta) -> bytes:
        """The event with origins and trees, for who asked for them."""
        told = self.extension.of(delta) if self.extension.asked else b""
        return self._encode({"type": "response.outrider", "outrider": msgspec.Raw(told)}) if told else b""

    async def _deltas(self) -> AsyncGenerator[Delta]:
        try:
            async with contextlib.aclosing(self.chat.answer.deltas()) as deltas:
                async for delta in deltas:
                    yield delta
        except OutriderError as error:
            raise in_its_words(error, self.tools) from error

    def _step(self, delta: Delta) -> Iterator[Event]:
        """The events of a delta. Each shows its item as it is when the event is taken."""
        self.transcript.tokens(delta.pieces or [])
        parts = self.message.feed(delta)
        for part in parts:
            call_id = self.message.call_ids[part.index] if isinstance(part, CallBegin) else ""
            yield from self.transcript.add(part, call_id)
        if delta.finish_reason is not None:
            yield from self.transcript.finish("incomplete" if delta.finish_reason == "length" else "completed")

    def _encode(self, event: Event) -> bytes:
        numbered = {**event, "sequence_number": self.num_events}
        self.num_events += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(numbered))

    def response(self, *, done: bool) -> ResponseObject:
        """The response as it stands."""
        body, chat = self.body, self.chat
        cut = self.message.finish_reason == "length"
        return ResponseObject(
            id=chat.id, created_at=self.created_at, model=chat.ready.model_name,
            status=("incomplete" if cut else "completed") if done else "in_progress",
            output=list(self.transcript.items) if done else [],
            incomplete_details=IncompleteDetails() if done and cut else None, usage=self._usage() if done else None,
            instructions=body.instructions, max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls, metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False, reasoning=body.reasoning,
            temperature=_or_default(body.temperature, chat.ready.sampling.get("temperature")),
            text=body.text or TextOptions(format=TextFormat(type="text")),
            tool_choice=body.tool_choice or "auto", tools=list(self.tools.kept),
            top_p=_or_default(body.top_p, chat.ready.sampling.get("top_p")), top_logprobs=body.top_logprobs or 0,
            user=body.user,
        )  # fmt: skip

    def _usage(self) -> ResponsesUsage:
        return ResponsesUsage.of(self.chat.usage([self.message]), self.message.reasoning_tokens)


def _or_default(given: float | None, default: float | None) -> float:
    return next((value for value in (given, default) if value is not None), 1.0)
