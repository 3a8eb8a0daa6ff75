"""What this server does not do. One table; a line goes when its feature comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.error_values import shown
from gateway.field_names import Names
from gateway.responses_schemas import ResponsesRequest
from gateway.schemas import ChatCompletionRequest, CompletionRequest, GenerateRequest, SglangSampling
from gateway.tokenization_schemas import TokenizeRequest
from outrider.errors import InvalidArgument

Refusable = (
    ChatCompletionRequest | CompletionRequest | GenerateRequest | SglangSampling | ResponsesRequest | TokenizeRequest
)
Asked = Callable[[Any], object]


def _given(*names: str) -> dict[str, Asked]:
    """Fields that ask for something wherever they hold something; a list of nothing does not."""
    return {name: lambda request, name=name: _holds(getattr(request, name)) for name in names}


def _holds(value: object) -> object:
    return any(each is not None and each is not False for each in value) if isinstance(value, list) else value


def _not_none(*names: str) -> dict[str, Asked]:
    """Fields that ask for something wherever they are given."""
    return {name: lambda request, name=name: getattr(request, name) is not None for name in names}


# Of vLLM's and SGLang's: who asks for one of these could not tell from an answer that it is not held to it.
_OF_OTHERS = {
    **_given(
        "guided_json", "guided_regex", "guided_choice", "guided_grammar", "allowed_token_ids", "bad_words",
        "include_stop_str_in_output", "no_stop_trim", "stop_regex", "use_beam_search", "logits_processors",
        "custom_logit_processor", "lora_path", "return_hidden_states", "grammar", "session_params", "prompt_embeds",
        "repetition_detection",
    ),
    **_not_none("truncate_prompt_tokens", "prompt_logprobs"),
    "include_reasoning": lambda request: request.include_reasoning is False,
    **{
        name: lambda request, name=name: getattr(request, name) not in (None, -1)
        for name in ("thinking_token_budget", "max_thinking_tokens")
    },
}  # fmt: skip

# A cache that is to be filled alone: the answer would be one that nobody asked for.
_PREWARM: dict[str, Asked] = {
    "prompt_cache_options": lambda request: (request.prompt_cache_options or {}).get("prewarm")
}

_REFUSED: dict[type, dict[str, Asked]] = {
    ChatCompletionRequest: {
        **_not_none("functions", "function_call", "audio", "web_search_options"),
        "modalities": lambda request: request.modalities is not None and request.modalities != ["text"],
        **_given("chat_template", "documents", "echo", "input_ids", "add_special_tokens", "moderation"),
        "add_generation_prompt": lambda request: request.add_generation_prompt is False,
        **_PREWARM,
        **_OF_OTHERS,
    },
    CompletionRequest: {
        **_given("suffix"),
        "best_of": lambda request: request.best_of is not None and request.best_of != (request.n or 1),
        "add_special_tokens": lambda request: request.add_special_tokens is False,
        **_PREWARM,
        **_OF_OTHERS,
    },
    GenerateRequest: _given(
        "token_ids_logprob", "image_data", "audio_data", "video_data", "input_embeds", "lora_path", "session_params",
        "custom_logit_processor", "return_hidden_states",
    ),
    SglangSampling: _given(
        "structural_tag", "stop_regex", "no_stop_trim", "include_stop_str_in_output", "allowed_token_ids", "bad_words"
    ),
    ResponsesRequest: {
        **_given(
            "background", "previous_response_id", "previous_response", "previous_input_messages", "structured_outputs",
            "json_schema", "regex", "ebnf", "moderation", "context_management", "add_special_tokens",
        ),
        **_not_none("conversation", "prompt", "response_format"),
        "truncation": lambda request: request.truncation == "auto",
        "n": lambda request: request.n not in (None, 1),
        **_PREWARM,
        **_OF_OTHERS,
    },
    TokenizeRequest: {**_given("chat_template"), **_not_none("truncate_prompt_tokens")},
}  # fmt: skip
_TEXTS = frozenset((
    "suffix", "image_data", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "bad_words",
    "chat_template", "structural_tag", "json_schema", "regex", "ebnf", "grammar", "stop_regex",
    "custom_logit_processor", "lora_path",
))  # what somebody wrote is not told  # fmt: skip
_HINTS = {
    "response_format": " Use `text.format`.",
    "functions": " Use `tools`.",
    "function_call": " Use `tool_choice`.",
    "token_ids_logprob": " Use `top_logprobs_num`.",
    "guided_json": " Use `structured_outputs` or `response_format`.",
    "guided_regex": " Use `structured_outputs` or `regex`.",
    "guided_choice": " Use `structured_outputs`.",
    "guided_grammar": " Use `structured_outputs` or `ebnf`.",
    "grammar": " Use `ebnf`.",
    "allowed_token_ids": " Use `logit_bias`, `regex` or `ebnf`.",
    "bad_words": " Use `logit_bias`.",
    "prompt_logprobs": " Use `echo` and `logprobs` of /v1/completions, or /generate.",
    "add_generation_prompt": " Use `continue_final_message`.",
    "prompt_cache_options": " Leave out `prewarm`.",
}


def refuse_unsupported(request: Refusable, names: Names | None = None) -> None:
    """InvalidArgument (unsupported_value) for the first field that asks for what this server does not do."""
    for name, asked in _REFUSED[type(request)].items():
        if asked(request):
            value = getattr(request, name)
            told = f"a string of {len(value)}" if name in _TEXTS and isinstance(value, str) else shown(value)
            raise InvalidArgument(
                f"This server does not support '{name}': {told}.{_HINTS.get(name, '')}",
                field=name if names is None else names.path(name), code="unsupported_value",
            )  # fmt: skip
