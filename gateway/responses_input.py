"""What a /v1/responses request asks, as the chat that it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from gateway.error_values import missing, not_text, shown
from gateway.field_names import Names
from gateway.responses_schemas import (
    InputContent,
    InputItem,
    ResponsesNamedTool,
    ResponsesRequest,
    ResponsesTool,
    ResponsesToolChoice,
)
from gateway.schemas import ChatCompletionRequest, ContentPart, JsonSchema, Message, ResponseFormat, SamplingFields
from gateway.tool_schemas import (
    AllowedTools,
    FunctionCall,
    FunctionDefinition,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCall,
    ToolChoice,
    ToolChoiceObject,
)
from gateway.unsupported import refuse_unsupported
from outrider.errors import InvalidArgument, OutriderError

LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = frozenset({LOGPROBS, "reasoning.encrypted_content"})  # the second is never there: nothing is hidden
_TEXT_TYPES = {"input_text": "text", "output_text": "text", "text": "text", "reasoning_text": "text",
               "summary_text": "text", "refusal": "refusal"}  # fmt: skip
_FIELDS = {"response_format": "text.format", "reasoning_effort": "reasoning.effort"}
# Objects of a chat's fields that this route's do without.
_FLAT = {"tools": ("function",), "tool_choice": ("function", "allowed_tools"), "response_format": ("json_schema",)}
NAMES = Names({"max_tokens": "max_output_tokens", "response_format": "text.format"})


def as_chat(body: ResponsesRequest) -> ChatCompletionRequest:
    """The chat. InvalidArgument for what this server does not do, and for items that are malformed."""
    refuse_unsupported(body)
    for index, value in enumerate(body.include or ()):
        if value not in _INCLUDABLE:
            raise InvalidArgument(
                f"The values are {', '.join(sorted(_INCLUDABLE))}.",
                field=f"include[{index}]", code="unsupported_value",
            )  # fmt: skip
    sampling = {name: getattr(body, name) for name in SamplingFields.__struct_fields__}
    tools, choice = _tools(body.tools), _choice(body.tool_choice)
    if tools is None and choice in ("auto", "none"):  # what this route's clients send where there are no tools
        choice = None
    return ChatCompletionRequest(
        **sampling, model=body.model, messages=_messages(body), max_completion_tokens=body.max_output_tokens,
        response_format=_format(body), tools=tools, tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls, stream=body.stream, logprobs=wants_logprobs(body),
        top_logprobs=body.top_logprobs, reasoning_effort=body.reasoning.effort if body.reasoning else None,
    )  # fmt: skip


def wants_logprobs(body: ResponsesRequest) -> bool:
    """Whether log-probabilities are asked for."""
    return bool(body.top_logprobs) or LOGPROBS in (body.include or ())


def in_its_words(error: OutriderError) -> OutriderError:
    """The error with this route's name for the field."""
    name, *inside = (error.field or "").split(".")
    bare = name.partition("[")[0]
    if bare == "messages":
        error.field = "input"
    elif bare in _FIELDS or bare in _FLAT:
        left = [step for step in inside if step not in _FLAT.get(bare, ())]
        error.field = ".".join([_FIELDS.get(bare, name), *left])
    return error


# ---- Items


def _messages(body: ResponsesRequest) -> list[Message]:
    made = [Message(role="developer", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*made, Message(role="user", content=body.input)]
    reasoning: list[str] = []
    for index, item in enumerate(body.input):
        path = f"input[{index}]"
        kind = item.type or "message"
        if kind == "reasoning":
            reasoning += [part.text or "" for part in _parts(item.content or item.summary or [])]
        elif kind == "message":
            made.append(_message(item, path))
        elif kind == "function_call":
            _add_call(made, item, path)
        elif kind == "function_call_output":
            made.append(_output(item, path))
        else:
            raise InvalidArgument(f"This server does not take items of the type {shown(kind)}.", field=f"{path}.type",
                                  code="unsupported_value")  # fmt: skip
        if kind != "reasoning" and reasoning and made[-1].role == "assistant":
            said = made[-1].reasoning_content  # before the text of a message that now has a call too
            made[-1].reasoning_content = "\n".join(reasoning if said is None else [said, *reasoning])
            reasoning = []
    return made


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else []


def _message(item: InputItem, path: str) -> Message:
    if item.role is None:
        raise missing(f"{path}.role")
    if item.role == "tool":
        raise InvalidArgument(
            f"A result of a call is an item of the type 'function_call_output'; the role of {path} is \"tool\".",
            field=f"{path}.role", code="invalid_value",
        )  # fmt: skip
    if item.content is None:
        raise missing(f"{path}.content")
    return Message(role=item.role, content=_content(item.content, f"{path}.content"))


def _content(content: InputContent, path: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    if not content:
        raise InvalidArgument("Content must have a part.", field=path, code="empty_array")
    made: list[ContentPart] = []
    for index, part in enumerate(content):
        kind = _TEXT_TYPES.get(part.type)
        if kind is None:
            raise not_text(part.type, f"{path}[{index}].type")
        if getattr(part, kind) is None:
            raise missing(f"{path}[{index}].{kind}")
        made.append(ContentPart(type=kind, text=part.text, refusal=part.refusal))
    return made


def _add_call(made: list[Message], item: InputItem, path: str) -> None:
    """Calls that follow one another, or the assistant's text, are one message."""
    for name in ("call_id", "name", "arguments"):
        if getattr(item, name) is None:
            raise missing(f"{path}.{name}")
    call = ToolCall(id=item.call_id or "", function=FunctionCall(name=item.name or "", arguments=item.arguments or ""))
    if made and made[-1].role == "assistant":
        made[-1].tool_calls = [*(made[-1].tool_calls or ()), call]
    else:
        made.append(Message(role="assistant", tool_calls=[call]))


def _output(item: InputItem, path: str) -> Message:
    if not item.call_id:
        raise missing(f"{path}.call_id")
    if item.output is None:
        raise missing(f"{path}.output")
    content = _content(item.output, f"{path}.output") if item.output else ""
    return Message(role="tool", tool_call_id=item.call_id, content=content)


# ---- Settings


def _format(body: ResponsesRequest) -> ResponseFormat | None:
    given = body.text.format if body.text is not None else None
    if given is None:
        return None
    if given.type == "json_schema":
        if given.schema is None:
            raise missing("text.format.schema")
        return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=given.schema, strict=given.strict))
    return ResponseFormat(type=given.type, schema=given.schema)


def _tools(tools: Sequence[ResponsesTool] | None) -> list[Tool] | None:
    """An empty list is what clients send for none."""
    if not tools:
        return None
    made: list[Tool] = []
    for index, tool in enumerate(tools):
        if tool.type != "function":
            raise InvalidArgument(
                f"This server knows only tools of type 'function', not {shown(tool.type)}.",
                field=f"tools[{index}].type", code="unsupported_value",
            )  # fmt: skip
        if tool.name is None:
            raise missing(f"tools[{index}].name")
        function = FunctionDefinition(
            name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
        )
        made.append(Tool(type="function", function=function))
    return made


def _choice(choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None) -> ToolChoice | None:
    if not isinstance(choice, ResponsesToolChoice):
        return choice
    if choice.type == "function":
        if choice.name is None:
            raise missing("tool_choice.name")
        return ToolChoiceObject(type="function", function=NamedFunction(name=choice.name))
    if choice.tools is None:
        raise missing("tool_choice.tools")
    allowed = AllowedTools(mode=choice.mode or "auto", tools=[_named(tool) for tool in choice.tools])
    return ToolChoiceObject(type="allowed_tools", allowed_tools=allowed)


def _named(tool: ResponsesNamedTool) -> NamedTool:
    return NamedTool(type="function", function=NamedFunction(name=tool.name))
