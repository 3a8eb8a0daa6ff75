"""Answers as types: what is encoded is what the OpenAPI document says."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from gateway.logprobs import ChatLogprobs, TextLogprobs
from gateway.tool_schemas import ToolCall
from gateway.totals import Totals
from outrider.speculation_count import SpeculationCount


class SpeculationUsage(Struct):
    """What speculation did for a request. `accept_length` is tokens committed per verify step."""

    verify_steps: int
    draft_tokens: int
    accepted_tokens: int
    accept_length: float | None

    @classmethod
    def of(cls, count: SpeculationCount) -> SpeculationUsage:
        """What speculation did for a request, from its counts."""
        return cls(count.verify_steps, count.draft_tokens, count.accepted_tokens, count.accept_length)


class PromptTokensDetails(Struct):
    """Where a prompt's tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """What became of a `prediction`, where one was given; tokens of the reasoning, where it is told apart."""

    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET
    reasoning_tokens: int | UnsetType = UNSET


class Usage(Struct):
    """Exact counts. `completion_tokens` are those emitted, up to the one that completed a stop string."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    speculation: SpeculationUsage
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @classmethod
    def of(cls, totals: Totals, *, reasoning_tokens: int | None = None) -> Usage:
        """The counts of one HTTP request."""
        details = CompletionTokensDetails()
        if totals.predicted_tokens is not None:
            details.accepted_prediction_tokens = totals.accepted_prediction_tokens
            details.rejected_prediction_tokens = totals.predicted_tokens - totals.accepted_prediction_tokens
        if reasoning_tokens is not None:
            details.reasoning_tokens = reasoning_tokens
        return cls(
            totals.prompt_tokens, totals.completion_tokens, totals.prompt_tokens + totals.completion_tokens,
            PromptTokensDetails(totals.cached_tokens), SpeculationUsage.of(totals.speculation),
            UNSET if totals.predicted_tokens is None and reasoning_tokens is None else details,
        )  # fmt: skip


class AssistantMessage(Struct):
    """The message of a chat answer."""

    content: str | None
    role: str = "assistant"
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    """One answer to a chat."""

    index: int
    message: AssistantMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None


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
    logprobs: TextLogprobs | None = None


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
