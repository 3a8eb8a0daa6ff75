"""POST /tokenize and /detokenize: text to ids and back, as the server itself does it."""

from __future__ import annotations

from typing import Any, cast

import msgspec
from msgspec import Raw
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway.conversation import encode_conversation
from gateway.error_values import no_such_token
from gateway.exchange import json_response
from gateway.offload import ID_COST, breathe, offload
from gateway.schemas import ChatCompletionRequest
from gateway.service import Ready, gateway_of
from gateway.tokenization_schemas import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from gateway.unsupported import refuse_unsupported
from outrider.errors import InvalidArgument

_OF_MESSAGES = ("tools", "continue_final_message", "chat_template_kwargs")
_PIECE = 2**16  # items that are encoded at once: the encoder keeps the interpreter to itself


async def tokenize(request: Request) -> ASGIApp:
    """POST /tokenize."""
    gateway = gateway_of(request)
    body = await gateway.read(request, TokenizeRequest)
    refuse_unsupported(body)
    ready = gateway.named(body.model)
    _check_form(body)
    if isinstance(body.prompt, list):
        rows: list[list[int]] = []
        for place, text in enumerate(body.prompt):
            await breathe(place)
            rows.append(await _encode(text, body, ready))
    elif body.prompt is not None:
        rows = [await _encode(body.prompt, body, ready)]
    else:
        rows = [await _encode_messages(body, ready, request.state.body_bytes)]
    return await offload(ID_COST * sum(map(len, rows)), _respond, rows, body, ready)


def _check_form(body: TokenizeRequest) -> None:
    """InvalidArgument unless the body has a prompt or messages, and only what goes with them."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidArgument("Give one of 'prompt' and 'messages'.", field="prompt", code="invalid_value")
    if body.messages is not None and body.add_special_tokens:
        raise InvalidArgument(
            "A chat template writes its own special tokens; 'add_special_tokens' goes with 'prompt'.",
            field="add_special_tokens", code="invalid_value",
        )  # fmt: skip
    for name in _OF_MESSAGES:
        if body.prompt is not None and getattr(body, name):
            raise InvalidArgument(f"'{name}' goes with 'messages'.", field=name, code="invalid_value")


def _respond(rows: list[list[int]], body: TokenizeRequest, ready: Ready) -> Response:
    """The answer; a list of prompts gets lists, one of them alone does not."""
    tokens, counts = [_json_array(row) for row in rows], [len(row) for row in rows]
    several = isinstance(body.prompt, list)
    made = TokenizeResponse(
        cast(Any, tokens if several else tokens[0]), counts if several else counts[0], ready.codec.context_length
    )
    if body.return_token_strs:
        strings = [_json_array(_strings(row, ready)) for row in rows]
        made.token_strs = cast(Any, strings if several else strings[0])
    return json_response(made)


def _strings(ids: list[int], ready: Ready) -> list[str]:
    return [ready.codec.piece(token).decode(errors="replace") for token in ids]


def _json_array(items: list[int] | list[str]) -> Raw:
    """A JSON array that is encoded already, in pieces."""
    pieces = (msgspec.json.encode(items[at : at + _PIECE])[1:-1] for at in range(0, len(items), _PIECE))
    return Raw(b"[%b]" % b",".join(pieces))


async def _encode(text: str, body: TokenizeRequest, ready: Ready) -> list[int]:
    ready.codec.check_length(text, "prompt")
    if body.add_special_tokens is False:
        return await ready.codec.encode_plain(text)
    return await ready.codec.encode_prompt(text)


async def _encode_messages(body: TokenizeRequest, ready: Ready, body_bytes: int) -> list[int]:
    if body.add_generation_prompt is False and not body.continue_final_message:
        raise InvalidArgument(
            "This server renders conversations for an answer; only continue_final_message leaves its beginning out.",
            field="add_generation_prompt", code="unsupported_value",
        )  # fmt: skip
    assert body.messages is not None
    chat = ChatCompletionRequest(
        messages=body.messages, tools=body.tools or None, continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )  # fmt: skip
    return (await encode_conversation(chat, ready, body_bytes)).ids


async def detokenize(request: Request) -> ASGIApp:
    """POST /detokenize."""
    gateway = gateway_of(request)
    body = await gateway.read(request, DetokenizeRequest)
    ready = gateway.named(body.model)
    rows = [item for item in body.tokens if isinstance(item, list)]
    if rows and len(rows) < len(body.tokens):
        raise InvalidArgument("Give ids or lists of ids, not both.", field="tokens", code="invalid_type")
    skip = body.skip_special_tokens is True
    if rows:
        texts = await offload(ID_COST * sum(map(len, rows)), lambda: [_decode(row, ready, skip) for row in rows])
        return json_response(DetokenizeResponse(texts, texts))
    ids = [item for item in body.tokens if isinstance(item, int)]
    text = await offload(ID_COST * len(ids), _decode, ids, ready, skip)
    return json_response(DetokenizeResponse(text, text))


def _decode(ids: list[int], ready: Ready, skip_special: bool) -> str:
    most = ready.served.model.vocab_size
    if max(ids, default=0) >= most:
        raise no_such_token(max(ids), most, "tokens")
    detokenizer = ready.codec.detokenizer(skip_special=skip_special)
    return "".join(map(detokenizer.push, ids)) + detokenizer.finish()
