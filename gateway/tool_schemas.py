"""Tools in requests and answers, as types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

MAX_TOOLS = 128
NAME_PATTERN = r"[a-zA-Z0-9_-]{1,130}"  # with its namespace before it
JoinedName = Annotated[str, Meta(pattern=rf"^{NAME_PATTERN}$")]
FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class FunctionDefinition(Struct, kw_only=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True):
    """One entry of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Struct, kw_only=True):
    """A function by its name."""

    name: FunctionName


class NamedTool(Struct, kw_only=True):
    """A tool by its name, in `tool_choice` and in the list of those that are allowed."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Struct, kw_only=True):
    """Part of the tools, by name."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class ToolChoiceObject(Struct, kw_only=True):
    """`tool_choice` as an object: one function, or the tools that are allowed."""

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


ToolChoice = Literal["none", "auto", "required"] | ToolChoiceObject
Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


class FunctionCall(Struct, kw_only=True):
    """A call: the arguments are JSON text."""

    name: str
    arguments: str


class ToolCall(Struct, kw_only=True):
    """One entry of an assistant's `tool_calls`."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
