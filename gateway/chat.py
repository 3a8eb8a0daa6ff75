"""POST /v1/chat/completions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import ASGIApp

from gateway.answer import Answer
from gateway.chat_rules import ChatRules, chat_rules, rewrites
from gateway.chunks import DONE, ChatChunks, extension_of
from gateway.conversation import encode_conversation
from gateway.error_values import shown
from gateway.exchange import event_stream, json_response, request_id
from gateway.field_names import Names
from gateway.logprobs import chat_logprobs, logprobs_cost
from gateway.message import Message, Whole
from gateway.messages import text_of
from gateway.offload import SCHEMA_COST, offload
from gateway.plan import Prompt, Report, check_stream_options, make_plan
from gateway.responses import AssistantMessage, ChatChoice, ChatCompletion, Usage
from gateway.schemas import ChatCompletionRequest, Prediction
from gateway.service import Gateway, Ready, gateway_of
from gateway.unsupported import refuse_unsupported
from outrider.errors import InvalidArgument


async def chat_completions(request: Request) -> ASGIApp:
    """Answers POST /v1/chat/completions: checks, renders, encodes, generates."""
    gateway = gateway_of(request)
    body = await gateway.read(request, ChatCompletionRequest)
    check_stream_options(body)
    ready = gateway.ready_for(body.model)
    id = f"chatcmpl-{request_id(request)}"
    chat = await begin_chat(gateway, body, ready, id, request, _names(body))
    if body.stream:
        return event_stream(request, _events(chat))
    wholes = await chat.collect()
    cost = logprobs_cost(chat.answer, body.top_logprobs or 0) if body.logprobs else 0
    return await offload(cost, lambda: json_response(_completion(chat, wholes)))


@dataclass(slots=True)
class Chat:
    """A chat whose answer is on its way."""

    body: ChatCompletionRequest
    ready: Ready
    id: str
    answer: Answer
    rules: ChatRules

    def messages(self) -> list[Message]:
        """A reader for each choice."""
        return [self.rules.message.message() for _ in self.answer.choices]

    async def collect(self) -> list[Whole]:
        """Every choice, read to the end."""
        wholes = [Whole(message) for message in self.messages()]
        async with contextlib.aclosing(self.answer.deltas()) as deltas:
            async for delta in deltas:
                wholes[delta.choice].add(delta)
        return wholes

    def usage(self, messages: list[Message]) -> Usage:
        """The counts so far."""
        reasons = self.rules.message.make_reasoning is not None
        reasoning_tokens = sum(message.reasoning_tokens for message in messages) if reasons else None
        return Usage.of(self.answer.totals, reasoning_tokens=reasoning_tokens)


def _names(body: ChatCompletionRequest) -> Names:
    """The newer name of `max_tokens` where that was sent."""
    return Names({"max_tokens": "max_completion_tokens"} if body.max_completion_tokens else {})


async def begin_chat(
    gateway: Gateway, body: ChatCompletionRequest, ready: Ready, id: str, request: Request, names: Names
) -> Chat:
    """Does everything that comes before the first token; the call begins when the answer's deltas are read."""
    refuse_unsupported(body)
    if body.top_logprobs and not body.logprobs:
        raise InvalidArgument("top_logprobs needs logprobs.", field="top_logprobs", code="invalid_value")
    encoded = await encode_conversation(body, ready, request.state.body_bytes)
    schema_bytes = request.state.body_bytes if rewrites(body, ready) else 0
    rules = await offload(SCHEMA_COST * schema_bytes, chat_rules, body, ready, encoded.tail, _continued(body))
    prediction = await _encode_prediction(body.prediction, ready) if body.prediction is not None else None
    report = Report(
        logprobs=bool(body.logprobs), top_logprobs=body.top_logprobs or 0,
        pieces=rules.message.make_reasoning is not None, markers=rules.markers,
    )  # fmt: skip
    plan = make_plan(
        body, [Prompt(encoded.ids, "messages")], request_id=id,
        max_tokens=body.max_completion_tokens or body.max_tokens, codec=ready.codec, served=ready.served,
        defaults=ready.sampling, names=names, prediction=prediction, grammar=rules.grammar, report=report,
    )  # fmt: skip
    (answer,) = gateway.answers(plan, request, grammar_field=names.path(rules.grammar_field))
    return Chat(body, ready, id, answer, rules)


def _continued(body: ChatCompletionRequest) -> str:
    """The beginning of an answer that is to be continued; empty where there is none."""
    content = body.messages[-1].content if body.continue_final_message else None
    return content if isinstance(content, str) else text_of(content or [], "messages")


async def _encode_prediction(prediction: Prediction, ready: Ready) -> list[int]:
    """Ids of the predicted text, cut at the context: it is only a hint."""
    if prediction.type != "content":
        raise InvalidArgument(
            f"The only type is 'content', not {shown(prediction.type)}.", field="prediction.type", code="invalid_value"
        )
    content = prediction.content
    text = content if isinstance(content, str) else text_of(content, "prediction.content")
    return await ready.codec.encode_plain(text[: ready.codec.max_chars])


def _completion(chat: Chat, wholes: list[Whole]) -> ChatCompletion:
    choices = [
        ChatChoice(
            index, _message(whole), whole.message.finish_reason or "stop",
            chat_logprobs(whole.pieces, chat.ready.codec.piece) if chat.body.logprobs else None,
        )
        for index, whole in enumerate(wholes)
    ]  # fmt: skip
    usage = chat.usage([whole.message for whole in wholes])
    return ChatCompletion(chat.id, int(time.time()), chat.ready.model_name, choices, usage, chat.answer.fingerprint)


def _message(whole: Whole) -> AssistantMessage:
    """Content is null where there are calls and nothing else."""
    content = "".join(whole.content)
    made = AssistantMessage(content if content or not whole.calls else None)
    if whole.calls:
        made.tool_calls = whole.tool_calls
    if whole.reasoning:
        made.reasoning_content = "".join(whole.reasoning)
    return made


async def _events(chat: Chat) -> AsyncGenerator[bytes]:
    messages = chat.messages()
    created, chunks = int(time.time()), None
    async with contextlib.aclosing(chat.answer.deltas()) as deltas:
        async for delta in deltas:
            chunks = chunks or _chunks(chat, messages, created)
            message = messages[delta.choice]
            yield chunks.events(delta, message.feed(delta), message.finish_reason, message.call_ids)
    options = chat.body.stream_options
    if chunks is not None and options and options.include_usage:
        yield chunks.usage(chat.usage(messages))
    yield DONE


def _chunks(chat: Chat, messages: list[Message], created: int) -> ChatChunks:
    """The writer of the stream, once the answer has begun: its fingerprint is known then."""
    body, ready, options = chat.body, chat.ready, chat.body.stream_options
    return ChatChunks(
        id=chat.id, created=created, model=ready.model_name, fingerprint=chat.answer.fingerprint,
        include_usage=bool(options and options.include_usage),
        extension=extension_of(body.speculative, ready.codec.piece),
        logprobs=bool(body.logprobs), piece_of=ready.codec.piece,
        current_usage=(lambda: chat.usage(messages)) if options and options.continuous_usage_stats else None,
    )  # fmt: skip
