"""What a /v1/responses request asks, as the chat that it is."""

from __future__ import annotations

from gateway.error_values import missing
from gateway.field_names import Names
from gateway.responses_items import messages_of
from gateway.responses_schemas import ResponsesRequest
from gateway.responses_tools import LeaveOut, RequestTools
from gateway.schemas import ChatCompletionRequest, JsonSchema, ResponseFormat, SamplingFields
from gateway.unsupported import refuse_unsupported
from outrider.errors import InvalidArgument, OutriderError

LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = frozenset({LOGPROBS, "reasoning.encrypted_content"})  # the second is never there: nothing is hidden
_FIELDS = {"response_format": "text.format", "reasoning_effort": "reasoning.effort"}
# Objects of a chat's fields that this route's do without.
_FLAT = {"tools": ("function",), "tool_choice": ("function", "allowed_tools"), "response_format": ("json_schema",)}
NAMES = Names({"max_tokens": "max_output_tokens", "response_format": "text.format"})


def as_chat(body: ResponsesRequest, tools: RequestTools, leave_out: LeaveOut) -> ChatCompletionRequest:
    """The chat. InvalidArgument for what this server does not do, and for items that are malformed."""
    refuse_unsupported(body)
    for index, value in enumerate(body.include or ()):
        if value not in _INCLUDABLE:
            raise InvalidArgument(
                f"The values are {', '.join(sorted(_INCLUDABLE))}.",
                field=f"include[{index}]", code="unsupported_value",
            )  # fmt: skip
    sampling = {name: getattr(body, name) for name in SamplingFields.__struct_fields__}
    return ChatCompletionRequest(
        **sampling, model=body.model, messages=messages_of(body, leave_out), stream=body.stream,
        max_completion_tokens=body.max_output_tokens, response_format=_format(body), logprobs=wants_logprobs(body),
        top_logprobs=body.top_logprobs, tools=tools.functions or None, tool_choice=tools.choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
    )  # fmt: skip


def wants_logprobs(body: ResponsesRequest) -> bool:
    """Whether log-probabilities are asked for."""
    return bool(body.top_logprobs) or LOGPROBS in (body.include or ())


def in_its_words(error: OutriderError, tools: RequestTools) -> OutriderError:
    """The error with this route's name for the field."""
    name, *inside = (error.field or "").split(".")
    bare, _, index = name.partition("[")
    if bare == "tools" and index:
        name = tools.places[int(index[:-1])]
    if bare == "messages":
        error.field = "input"
    elif bare in _FIELDS or bare in _FLAT:
        left = [step for step in inside if step not in _FLAT.get(bare, ())]
        error.field = ".".join([_FIELDS.get(bare, name), *left])
    return error


def _format(body: ResponsesRequest) -> ResponseFormat | None:
    given = body.text.format if body.text is not None else None
    if given is None:
        return None
    if given.type == "json_schema":
        if given.schema is None:
            raise missing("text.format.schema")
        return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=given.schema, strict=given.strict))
    return ResponseFormat(type=given.type, schema=given.schema)
