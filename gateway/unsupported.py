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


# Constraints and searches of vLLM's: who asks for them could not tell from an answer that it is not held to them.
_OF_VLLM: dict[str, Callable[[Any], object]] = {
    name: _given(name)
    for name in (
        "guided_json", "guided_regex", "guided_choice", "guided_grammar", "allowed_token_ids", "bad_words",
        "include_stop_str_in_output", "use_beam_search",
    )
}  # fmt: skip

_REFUSED: dict[type, dict[str, Callable[[Any], object]]] = {
    ChatCompletionRequest: {
        "functions": lambda request: request.functions is not None,
        "function_call": lambda request: request.function_call is not None,
        "modalities": lambda request: request.modalities is not None and request.modalities != ["text"],
        "audio": lambda request: request.audio is not None,
        "web_search_options": lambda request: request.web_search_options is not None,
        **_OF_VLLM,
    },
    CompletionRequest: {
        "suffix": _given("suffix"),
        "best_of": lambda request: request.best_of is not None and request.best_of != (request.n or 1),
        **_OF_VLLM,
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
_TEXTS = frozenset(
    ("suffix", "image_data", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "bad_words")
)  # what somebody wrote is not told
_HINTS = {
    "functions": " Use `tools`.",
    "function_call": " Use `tool_choice`.",
    "token_ids_logprob": " Use `top_logprobs_num`.",
    "guided_json": " Use `structured_outputs` or `response_format`.",
    "guided_regex": " Use `structured_outputs` or `regex`.",
    "guided_choice": " Use `structured_outputs`.",
    "guided_grammar": " Use `structured_outputs` or `ebnf`.",
    "allowed_token_ids": " Use `logit_bias`, `regex` or `ebnf`.",
    "bad_words": " Use `logit_bias`.",
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
