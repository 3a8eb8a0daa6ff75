"""POST /v1/responses as types: the request, and the response object with its items."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.logprobs import TokenLogprob
from gateway.responses import SpeculationUsage, Usage
from gateway.schemas import Count, Metadata, RefusedFields, Role, TopLogprobs
from gateway.tool_schemas import MAX_TOOLS, FunctionName, JoinedName

# ---- The request


class InputPart(Struct, kw_only=True):
    """One part of an item's content, only text of which can be served, or of what a shell gave: it has no type."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    stdout: str | None = None
    stderr: str | None = None
    outcome: dict[str, Any] | None = None


InputContent = str | Annotated[list[InputPart], Meta(max_length=1024)]


class InputItem(Struct, kw_only=True):
    """One item of `input`: a message, a call, its output, or reasoning that was given back.

    The last block is of calls that are none of a function.
    """

    type: str | None = None
    id: str | None = None
    status: str | None = None
    role: Role | None = None
    content: InputContent | None = None
    call_id: str | None = None
    namespace: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None  # text; an object is that of a search for tools
    output: InputContent | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None

    input: str | None = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    code: str | None = None
    outputs: list[dict[str, Any]] | None = None
    queries: list[str] | None = None
    results: list[dict[str, Any]] | None = None
    error: Any = None


class NamespacedTool(Struct, kw_only=True):
    """One tool of a namespace."""

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesTool(NamespacedTool, kw_only=True):
    """A function that the model may call, or a namespace with some; other tools have only their type here."""

    tools: Annotated[list[NamespacedTool], Meta(max_length=MAX_TOOLS)] | UnsetType | None = UNSET


class ResponsesNamedTool(Struct, kw_only=True, omit_defaults=True):
    """A function or a namespace by its name, or a tool that has only a type."""

    type: str
    name: JoinedName | None = None


class ResponsesToolChoice(Struct, kw_only=True, omit_defaults=True):
    """`tool_choice` as an object: one function, or those that are allowed."""

    type: str
    name: JoinedName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[ResponsesNamedTool], Meta(min_length=1, max_length=MAX_TOOLS)] | None = None


class TextFormat(Struct, kw_only=True, omit_defaults=True):
    """What the text must match."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(Struct, kw_only=True):
    """How the text is written."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Struct, kw_only=True):
    """How much the model reasons; summaries are not made."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesStreamOptions(Struct, kw_only=True):
    """How a stream is reported; accepted, and has no effect."""

    include_obfuscation: bool | None = None


class ResponsesRequest(RefusedFields, kw_only=True):
    """The body. Nothing is stored: what refers to an earlier response is refused."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=4096)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[ResponsesTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    top_logprobs: TopLogprobs | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None

    background: bool | None = None
    previous_response_id: str | None = None
    previous_response: Any = None
    previous_input_messages: Any = None
    conversation: Any = None
    prompt: Any = None
    moderation: Any = None
    context_management: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    max_tool_calls: Count | None = None

    user: str | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


# ---- The response


class OutputText(Struct, kw_only=True):
    """The text of a message."""

    text: str
    type: Literal["output_text"] = "output_text"
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(Struct, kw_only=True):
    """A message of the assistant."""

    id: str
    content: list[OutputText]
    status: Literal["in_progress", "completed", "incomplete"]
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class ReasoningText(Struct, kw_only=True):
    """What the model wrote before its answer."""

    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


class ReasoningItem(Struct, kw_only=True):
    """Reasoning; it has no summary."""

    id: str
    content: list[ReasoningText]
    status: Literal["in_progress", "completed", "incomplete"]
    type: Literal["reasoning"] = "reasoning"
    summary: list[Any] = []


class FunctionCallItem(Struct, kw_only=True):
    """A call that the client is to make; `namespace` is there where the function is of one."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]
    namespace: str | UnsetType = UNSET
    type: Literal["function_call"] = "function_call"


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(Struct):
    """Where the input's tokens came from."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    """What the output's tokens are."""

    reasoning_tokens: int


class ResponsesUsage(Struct):
    """Exact counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    speculation: SpeculationUsage

    @classmethod
    def of(cls, usage: Usage, reasoning_tokens: int) -> ResponsesUsage:
        """A response's usage from a chat's."""
        return cls(
            usage.prompt_tokens, InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens, OutputTokensDetails(reasoning_tokens), usage.total_tokens, usage.speculation,
        )  # fmt: skip


class IncompleteDetails(Struct):
    """Why a response ended before it was complete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(Struct, kw_only=True):
    """The response, whole or on its way; the settings are those of the request."""

    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete"]
    output: list[Any]  # OutputItem each
    object: Literal["response"] = "response"
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponsesUsage | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None  # of tools that the server runs, of which there are none
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    reasoning: ReasoningOptions | None = None
    store: bool = False
    temperature: float | None = None
    text: TextOptions | UnsetType = UNSET
    tool_choice: Any = "auto"
    tools: list[ResponsesTool] = []  # without those that were left out
    top_p: float | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    user: str | None = None
    background: bool = False
