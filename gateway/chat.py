"""POST /v1/chat/completions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from gateway.answer import Answer, collect
from gateway.constraints import of_response_format
from gateway.exchange import event_stream, json_response, request_id, until_disconnect
from gateway.messages import text_of, to_template
from gateway.offload import offload
from gateway.plan import Plan, Prompt, check_stream_options, make_plan, refuse_unsupported
from gateway.responses import DONE, AssistantMessage, ChatChoice, ChatChunks, ChatCompletion, Usage
from gateway.schemas import ChatCompletionRequest, Prediction
from gateway.service import Ready, gateway_of
from gateway.shield import Cover
from gateway.tokenizer import TextCodec
from outrider.errors import InvalidArgument

_MAX_TEMPLATE_KWARGS = 16
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})


async def chat_completions(request: Request) -> ASGIApp:
    """Checks, renders, encodes, generates, answers."""
    gateway = gateway_of(request)
    body = await gateway.read(request, ChatCompletionRequest)
    check_stream_options(body)
    ready = gateway.ready_for(body.model)
    refuse_unsupported(body)
    id = f"chatcmpl-{request_id(request)}"
    plan = await _plan(body, ready, id, request.state.body_bytes)
    (answer,) = gateway.answers(plan)
    if body.stream:
        return event_stream(request, _events(body, ready, answer, id))
    (collected,) = await until_disconnect(request.receive, collect([answer]))
    choices = [
        ChatChoice(index, AssistantMessage(choice.text), choice.finish_reason) for index, choice in enumerate(collected)
    ]
    usage = Usage.of([answer], predicted=body.prediction is not None)
    made = ChatCompletion(id, int(time.time()), ready.model_name, choices, usage, ready.fingerprint)
    return json_response(made)


async def _events(body: ChatCompletionRequest, ready: Ready, answer: Answer, id: str) -> AsyncGenerator[bytes]:
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    chunks = ChatChunks(
        id=id, created=int(time.time()), model=ready.model_name, fingerprint=ready.fingerprint,
        include_usage=include_usage,
    )  # fmt: skip
    async with contextlib.aclosing(answer.deltas()) as deltas:
        async for delta in deltas:
            yield chunks.events(delta)
    if include_usage:
        yield chunks.usage(Usage.of([answer], predicted=body.prediction is not None))
    yield DONE


async def _plan(body: ChatCompletionRequest, ready: Ready, id: str, body_bytes: int) -> Plan:
    ids = await encode_conversation(body, ready, body_bytes)
    prediction = await _encode_prediction(body.prediction, ready) if body.prediction is not None else ()
    return make_plan(
        body, [Prompt(ids, "messages")], request_id=id, max_tokens=body.max_completion_tokens or body.max_tokens,
        codec=ready.codec, info=ready.info, prediction=prediction, grammar=of_response_format(body.response_format),
    )  # fmt: skip


async def encode_conversation(body: ChatCompletionRequest, ready: Ready, body_bytes: int) -> list[int]:
    """The conversation as ids, control tokens coming from the template alone."""
    if ready.template is None:
        raise InvalidArgument(
            "This model has no chat template; --chat-template gives one.", field="messages", code="template_error"
        )
    context, cover = await offload(body_bytes, _template_context, body, ready.codec)
    try:
        rendered = await ready.template.render(context, ready.codec.max_chars)
    except InvalidArgument as error:  # the template may have put a message's text into its reason
        raise InvalidArgument(cover.uncover(error.message), field=error.field, code=error.code) from error
    if body.continue_final_message:
        rendered, marked, _ = rendered.partition(cover.end)
        if not marked:
            raise InvalidArgument(
                "The chat template does not let the last message be continued.",
                field="continue_final_message", code="template_error",
            )  # fmt: skip
    return await ready.codec.encode_chat(rendered, cover)


def _template_context(body: ChatCompletionRequest, codec: TextCodec) -> tuple[dict[str, Any], Cover]:
    """What the template is given, with every string of the user's covered; and the cover."""
    messages = to_template(body.messages)
    kwargs = _template_kwargs(body)
    codec.check_length("".join(message["content"] for message in messages), "messages")
    cover = codec.covering(messages, kwargs)
    covered: list[dict[str, Any]] = cover.cover(messages)
    if body.continue_final_message:
        _mark_end(covered, cover)
    add_prompt = not body.continue_final_message
    return {**cover.cover(kwargs), "messages": covered, "add_generation_prompt": add_prompt}, cover


def _mark_end(messages: list[dict[str, Any]], cover: Cover) -> None:
    """Puts a mark where the assistant's last message ends: what the template writes after it is cut off."""
    last = messages[-1]
    if last["role"] != "assistant":
        raise InvalidArgument(
            "Only an assistant's message can be continued.", field="continue_final_message", code="invalid_value"
        )
    messages[-1] = {**last, "content": last["content"].rstrip() + cover.end}


def _template_kwargs(body: ChatCompletionRequest) -> dict[str, Any]:
    """Switches for the template: plain values under names that mean nothing else."""
    kwargs = dict(body.chat_template_kwargs or {})
    if len(kwargs) > _MAX_TEMPLATE_KWARGS or not all(
        isinstance(v, str | bool | int | float | None) for v in kwargs.values()
    ):
        raise InvalidArgument(
            f"chat_template_kwargs takes at most {_MAX_TEMPLATE_KWARGS} strings, numbers and booleans.",
            field="chat_template_kwargs", code="invalid_value",
        )  # fmt: skip
    if any(name in _RESERVED or name.endswith("_token") or not name.isidentifier() for name in kwargs):
        raise InvalidArgument(
            "chat_template_kwargs has a name that is not allowed.", field="chat_template_kwargs", code="invalid_value"
        )
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return kwargs


async def _encode_prediction(prediction: Prediction, ready: Ready) -> list[int]:
    """Ids of the predicted text, cut at the context: it is only a hint."""
    if prediction.type != "content":
        raise InvalidArgument("The only type is 'content'.", field="prediction.type", code="invalid_value")
    content = prediction.content
    text = content if isinstance(content, str) else text_of(content, "prediction.content")
    return await ready.codec.encode_plain(text[: ready.codec.max_chars])
