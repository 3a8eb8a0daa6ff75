"""What is not done here is refused, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.field_names import Names
from gateway.responses_schemas import ResponsesRequest
from gateway.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateRequest,
    RefusedFields,
    SamplingFields,
    SglangSampling,
)
from gateway.unsupported import _REFUSED, refuse_unsupported
from outrider.errors import InvalidArgument

CHAT: dict[str, Any] = {"messages": []}
NEUTRAL: list[tuple[type, dict[str, Any]]] = [
    (ChatCompletionRequest, {**CHAT, "add_generation_prompt": True, "echo": False, "add_special_tokens": False}),
    (ChatCompletionRequest, {**CHAT, "modalities": ["text"], "documents": [], "chat_template": None}),
    (CompletionRequest, {"prompt": "a", "add_special_tokens": True, "suffix": "", "n": 2, "best_of": 2}),
    (CompletionRequest, {"prompt": "a", "include_reasoning": True, "thinking_token_budget": -1}),
    (GenerateRequest, {"image_data": [], "return_hidden_states": [False], "lora_path": [None, None]}),
    (ResponsesRequest, {"input": "a", "truncation": "disabled", "background": False}),
    (ResponsesRequest, {"input": "a", "context_management": [], "prompt_cache_options": {"prewarm": False}}),
    (SglangSampling, {"no_stop_trim": False, "stop_regex": None}),
]
ASKING: list[tuple[type, dict[str, Any]]] = [
    (ChatCompletionRequest, {**CHAT, "documents": [{"text": "a"}]}),
    (ChatCompletionRequest, {**CHAT, "add_special_tokens": True}),
    (ChatCompletionRequest, {**CHAT, "truncate_prompt_tokens": -1}),
    (CompletionRequest, {"prompt": "a", "add_special_tokens": False}),
    (CompletionRequest, {"prompt": "a", "lora_path": "secret"}),
    (CompletionRequest, {"prompt": "a", "include_reasoning": False}),
    (CompletionRequest, {"prompt": "a", "allowed_token_ids": [0]}),
    (ChatCompletionRequest, {**CHAT, "thinking_token_budget": 0}),
    (GenerateRequest, {"return_hidden_states": [False, True]}),
    (ResponsesRequest, {"input": "a", "structured_outputs": {"regex": "a"}}),
    (ResponsesRequest, {"input": "a", "response_format": {"type": "text"}}),
    (ResponsesRequest, {"input": "a", "stop_regex": "secret"}),
    (ResponsesRequest, {"input": "a", "context_management": [{"type": "compaction"}]}),
    (ChatCompletionRequest, {**CHAT, "moderation": {"model": "secret"}}),
    (CompletionRequest, {"prompt": "a", "prompt_cache_options": {"prewarm": True, "ttl": "secret"}}),
    (SglangSampling, {"stop_regex": "secret"}),
]


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest, ResponsesRequest])
def test_no_field_is_known_and_passed_over(kind: type[RefusedFields]) -> None:
    declared = set(RefusedFields.__struct_fields__) - set(SamplingFields.__struct_fields__)
    assert declared <= _REFUSED[kind].keys()
    assert _REFUSED[kind].keys() <= set(kind.__struct_fields__)


@pytest.mark.parametrize(("kind", "fields"), NEUTRAL)
def test_fields_that_ask_for_nothing_are_taken(kind: type, fields: dict[str, Any]) -> None:
    refuse_unsupported(kind(**fields))


@pytest.mark.parametrize(("kind", "fields"), ASKING)
def test_fields_that_ask_for_more_are_named_and_texts_not_told(kind: type, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        refuse_unsupported(kind(**fields), Names(inside="here."))
    assert refused.value.field == f"here.{[*fields][-1]}"
    assert "secret" not in refused.value.message
