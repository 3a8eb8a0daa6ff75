"""What this server does not do. One table; a line goes when its feature comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.error_values import shown
from gateway.responses_schemas import ResponsesRequest
from gateway.schemas import ChatCompletionRequest, CompletionRequest, GenerateRequest
from outrider.errors import InvalidArgument

Refusable = ChatCompletionRequest | CompletionRequest | GenerateRequest | ResponsesRequest


def _given(name: str) -> Callable[[Any], object]:
    return lambda request: getattr(request, name)


_REFUSED: dict[type, dict[str, Callable[[Any], object]]] = {
    ChatCompletionRequest: {
        "functions": lambda request: request.functions is not None,
        "function_call": lambda request: request.function_call is not None,
        "modalities": lambda request: request.modalities is not None and request.modalities != ["text"],
        "audio": lambda request: request.audio is not None,
        "web_search_options": lambda request: request.web_search_options is not None,
    },
    CompletionRequest: {
        "suffix": _given("suffix"),
        "best_of": lambda request: request.best_of is not None and request.best_of != (request.n or 1),
    },
    GenerateRequest: {
        "token_ids_logprob": _given("token_ids_logprob"),
        "image_data": _given("image_data"),
    },
    ResponsesRequest: {
        "background": _given("background"),
        "previous_response_id": _given("previous_response_id"),
        "conversation": lambda request: request.conversation is not None,
        "prompt": lambda request: request.prompt is not None,
        "truncation": lambda request: request.truncation == "auto",
        "n": lambda request: request.n not in (None, 1),
    },
}
_TEXTS = frozenset(("suffix", "image_data"))  # what somebody wrote is not told
_HINTS = {
    "functions": " Use `tools`.",
    "function_call": " Use `tool_choice`.",
    "token_ids_logprob": " Use `top_logprobs_num`.",
}


def refuse_unsupported(request: Refusable) -> None:
    """InvalidArgument (unsupported_value) for the first field that asks for what this server does not do."""
    for name, asked in _REFUSED[type(request)].items():
        if asked(request):
            value = getattr(request, name)
            told = f"a string of {len(value)}" if name in _TEXTS and isinstance(value, str) else shown(value)
            raise InvalidArgument(
                f"This server does not support '{name}': {told}.{_HINTS.get(name, '')}",
                field=name, code="unsupported_value",
            )  # fmt: skip
