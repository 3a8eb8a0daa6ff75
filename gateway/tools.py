"""What a request's tools ask of the output: which may be called, whether one must be, and the schema that sees to it.

Where a call is forced, the output is a JSON document that verify's grammar holds to the tools' schemas, whatever format
the model was trained on. Otherwise the model writes calls in its own format and a parser finds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from gateway.error_values import missing, shown
from gateway.json_schema import moved
from gateway.sayable import check_schema, sayable
from gateway.tool_schemas import NamedTool, Tool, ToolChoice, ToolChoiceObject
from outrider.errors import InvalidArgument
from outrider.wire import MAX_GRAMMAR_BYTES

MAX_CALLS = 32  # of one answer that must make calls
Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The tools of one request. `tools` are those that may be called; the template is shown them all the same."""

    tools: tuple[Tool, ...]
    mode: Mode
    parallel: bool

    @property
    def names(self) -> frozenset[str]:
        """Functions that may be called."""
        return frozenset(tool.function.name for tool in self.tools)

    @property
    def forced(self) -> bool:
        """Whether the output must be a call."""
        return self.mode in ("required", "named")

    def parameters(self) -> Mapping[str, dict[str, Any]]:
        """Each function's schema."""
        return {tool.function.name: arguments_schema(tool) for tool in self.tools}

    def forced_schema(self) -> dict[str, Any] | None:
        """What the whole output must match: one function's arguments, or a list of calls. None where it is free."""
        if self.mode == "named":
            return arguments_schema(self.tools[0])
        if self.mode != "required":
            return None
        return {
            "type": "array", "minItems": 1, "maxItems": MAX_CALLS if self.parallel else 1,
            "items": {"anyOf": [call_schema(tool) for tool in self.tools]},
            "$defs": {name: moved(schema, f"#/$defs/{name}") for name, schema in self.parameters().items()},
        }  # fmt: skip

    def check_size(self) -> None:
        """InvalidArgument for a schema that no grammar has room for, before the work of rewriting it."""
        for tool in self.tools:
            size = len(msgspec.json.encode(tool.function.parameters))
            if size > MAX_GRAMMAR_BYTES:
                raise InvalidArgument(
                    f"The schema of {shown(tool.function.name)} has {size} bytes; output can be held to "
                    f"{MAX_GRAMMAR_BYTES}.", field="tools", code="invalid_json_schema",
                )  # fmt: skip


def check_schemas(tools: Sequence[Tool] | None) -> None:
    """InvalidArgument for a tool whose parameters are nested too deeply, or strict and rounded."""
    for index, tool in enumerate(tools or ()):
        function = tool.function
        check_schema(function.parameters, f"tools[{index}].function.parameters", strict=bool(function.strict))


def plan_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> ToolPlan | None:
    """The plan of a request, None where there are no tools. InvalidArgument for what does not go together."""
    if tools is None:
        if choice not in (None, "none"):
            raise InvalidArgument("tool_choice needs tools.", field="tool_choice", code="invalid_value")
        return None
    if not tools:
        raise InvalidArgument("tools must have an entry.", field="tools", code="empty_array")
    by_name: dict[str, Tool] = {}
    for index, tool in enumerate(tools):
        if by_name.setdefault(tool.function.name, tool) is not tool:
            field = f"tools[{index}].function.name"
            raise InvalidArgument(
                f"Two tools have the name {shown(tool.function.name)}.", field=field, code="invalid_value"
            )
    mode, allowed = _choose(choice, by_name)
    return ToolPlan(allowed, mode, parallel is not False)


def _choose(choice: ToolChoice | None, by_name: Mapping[str, Tool]) -> tuple[Mode, tuple[Tool, ...]]:
    if not isinstance(choice, ToolChoiceObject):
        return choice or "auto", tuple(by_name.values())
    if choice.type == "function":
        if choice.function is None:
            raise missing("tool_choice.function")
        return "named", (_named(choice.function.name, by_name, "tool_choice.function.name"),)
    if choice.allowed_tools is None:
        raise missing("tool_choice.allowed_tools")
    return choice.allowed_tools.mode, _allowed(choice.allowed_tools.tools, by_name)


def _allowed(given: Sequence[NamedTool], by_name: Mapping[str, Tool]) -> tuple[Tool, ...]:
    path = "tool_choice.allowed_tools.tools"
    found = {
        tool.function.name: _named(tool.function.name, by_name, f"{path}[{index}].function.name")
        for index, tool in enumerate(given)
    }
    return tuple(found.values())


def _named(name: str, by_name: Mapping[str, Tool], field: str) -> Tool:
    if name not in by_name:
        raise not_offered(name, field)
    return by_name[name]


def not_offered(name: str, field: str) -> InvalidArgument:
    """The error for a choice of what is not offered."""
    return InvalidArgument(f"The function {shown(name)} is not among the tools.", field=field, code="invalid_value")


# ---- Schemas


def call_schema(tool: Tool) -> dict[str, Any]:
    """A call of one tool as an object, its arguments by reference to where `forced_schema` puts them."""
    name = tool.function.name
    return {
        "type": "object", "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
        "required": ["name", "arguments"], "additionalProperties": False,
    }  # fmt: skip


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """A tool's schema, of an object though it may not say so: as much as can be of it, or all where it is strict.

    One without parameters has none.
    """
    given = {"type": "object", **(tool.function.parameters or {"properties": {}, "additionalProperties": False})}
    return sayable(given, strict=bool(tool.function.strict))
