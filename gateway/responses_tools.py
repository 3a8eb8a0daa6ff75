"""The tools of a /v1/responses request as those of a chat, which has functions alone.

A namespace's functions are offered under joined names, and tools that this server cannot run are left out. Its choices
follow. Knows nothing of items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gateway.error_values import missing, shown
from gateway.responses_schemas import (
    NamespacedTool,
    ResponsesNamedTool,
    ResponsesRequest,
    ResponsesTool,
    ResponsesToolChoice,
)
from gateway.tool_schemas import (
    MAX_TOOLS,
    AllowedTools,
    FunctionDefinition,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
    ToolChoiceObject,
)
from gateway.tools import not_offered
from outrider.errors import InvalidArgument

LeaveOut = Callable[[str, InvalidArgument], None]  # as BodyDecoder.leave_out
# Tools that OpenAI's servers run, or that its models were taught: no description of them is in the request.
_BUILT_IN = frozenset((
    "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "file_search",
    "code_interpreter", "computer", "computer_use", "computer_use_preview", "image_generation", "mcp", "local_shell",
    "shell", "apply_patch", "tool_search", "programmatic_tool_calling",
))  # fmt: skip
_SEPARATOR = "__"


class Namespaced(NamedTuple):
    """A function as clients know it."""

    namespace: str
    name: str


@dataclass(slots=True)
class RequestTools:
    """What became of a request's tools: `functions` are offered, each from its place in `places`; `kept` are those of
    the request that they come from. `namespaced` has the functions of namespaces by their joined names."""

    functions: list[Tool] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    kept: list[ResponsesTool] = field(default_factory=list)
    namespaced: dict[str, Namespaced] = field(default_factory=dict)
    num_left_out: int = 0

    def choice(self, given: Literal["none", "auto", "required"] | ResponsesToolChoice | None) -> ToolChoice | None:
        """A request's `tool_choice` as a chat's. InvalidArgument for one that is malformed or leaves nothing."""
        if not isinstance(given, ResponsesToolChoice):
            # What this route's clients send where there are no tools.
            return None if given in ("auto", "none") and not self.functions else given
        if given.type == "function":
            if given.name is None:
                raise missing("tool_choice.name")
            return ToolChoiceObject(type="function", function=NamedFunction(name=self._name(given.name, "tool_choice")))
        if given.type != "allowed_tools":
            raise _refusal(given.type, "tool_choice.type")
        if given.tools is None:
            raise missing("tool_choice.tools")
        names = [name for index, tool in enumerate(given.tools) for name in self._names(tool, index)]
        if not names:
            raise _refusal(given.tools[0].type, "tool_choice.tools[0].type")
        tools = [NamedTool(type="function", function=NamedFunction(name=name)) for name in names]
        return ToolChoiceObject(
            type="allowed_tools", allowed_tools=AllowedTools(mode=given.mode or "auto", tools=tools)
        )

    def _names(self, tool: ResponsesNamedTool, index: int) -> Iterator[str]:
        """The functions that an entry of the allowed ones stands for: none where it is left out."""
        path = f"tool_choice.tools[{index}]"
        if tool.type in _BUILT_IN:
            return
        if tool.type not in ("function", "namespace"):
            raise _refusal(tool.type, f"{path}.type")
        if tool.name is None:
            raise missing(f"{path}.name")
        if tool.type == "function":
            yield self._name(tool.name, path)
            return
        inside = [full for full, origin in self.namespaced.items() if origin.namespace == tool.name]
        if not inside:
            raise InvalidArgument(
                f"The namespace {shown(tool.name)} is not among the tools.", field=f"{path}.name", code="invalid_value"
            )
        yield from inside

    def _name(self, name: str, path: str) -> str:
        """The offered function that a choice names: as it is offered, or as its namespace has it."""
        offered = [tool.function.name for tool in self.functions]
        if name in offered or not (offered or self.num_left_out):  # without any, the chat says so
            return name
        found = [full for full, origin in self.namespaced.items() if origin.name == name]
        if not found:
            raise not_offered(name, f"{path}.name")
        if len(found) > 1:
            raise InvalidArgument(
                f"Several namespaces have a function {shown(name)}: say {shown(found[0])}, or its like.",
                field=f"{path}.name", code="invalid_value",
            )  # fmt: skip
        return found[0]


def joined(namespace: str | None, name: str) -> str:
    """What a function is called before the model, which knows no namespaces."""
    if not namespace:
        return name
    return namespace + ("" if namespace.endswith(_SEPARATOR) else _SEPARATOR) + name


def read_tools(body: ResponsesRequest, leave_out: LeaveOut) -> RequestTools:
    """The tools that a chat can have. InvalidArgument for those that are malformed, or cannot be left out."""
    made = RequestTools()
    for index, tool in enumerate(body.tools or ()):
        path = f"tools[{index}]"
        if tool.type in _BUILT_IN:
            refusal = _refusal(tool.type, f"{path}.type")
            made.num_left_out += 1
            leave_out(f"tools.{tool.type}", refusal)
            continue
        if tool.type == "function":
            _add(made, tool, path)
        elif tool.type == "namespace":
            _add_namespace(made, tool, path)
        else:
            raise _refusal(tool.type, f"{path}.type")
        made.kept.append(tool)
    if body.tool_choice == "required" and made.num_left_out and not made.functions:
        raise InvalidArgument(
            "tool_choice asks for a call, and this server can run none of the tools.",
            field="tool_choice", code="unsupported_value",
        )  # fmt: skip
    if len(made.functions) > MAX_TOOLS:
        raise InvalidArgument(
            f"The tools have {len(made.functions)} functions; this server takes {MAX_TOOLS}.",
            field="tools", code="array_above_max_length",
        )  # fmt: skip
    return made


def _add(made: RequestTools, tool: NamespacedTool, path: str, namespace: str = "", told: str = "") -> None:
    """Adds a function; `told` goes before what is said of it."""
    if tool.type != "function":
        raise _refusal(tool.type, f"{path}.type")
    if tool.name is None:
        raise missing(f"{path}.name")
    name = joined(namespace, tool.name)
    description = "\n".join(text for text in (told, tool.description) if text)
    function = FunctionDefinition(name=name, description=description, parameters=tool.parameters, strict=tool.strict)
    made.functions.append(Tool(type="function", function=function))
    made.places.append(path)
    if namespace:
        made.namespaced[name] = Namespaced(namespace, tool.name)


def _add_namespace(made: RequestTools, namespace: ResponsesTool, path: str) -> None:
    """Adds a namespace's functions. What is said of it is told once, with the first of them."""
    if namespace.name is None:
        raise missing(f"{path}.name")
    if not isinstance(namespace.tools, list):
        raise missing(f"{path}.tools")
    for index, tool in enumerate(namespace.tools):
        told = (namespace.description or "") if index == 0 else ""
        _add(made, tool, f"{path}.tools[{index}]", namespace.name, told)


def _refusal(kind: str, field: str) -> InvalidArgument:
    """The error for a tool that cannot be had."""
    if kind in _BUILT_IN:
        told = f"This server cannot run the tool {shown(kind)}."
    elif kind == "custom":
        told = 'This server has no tools of the type "custom", whose input is free text. Use a function.'
    else:
        told = f"This server knows tools of the types 'function' and 'namespace', not {shown(kind)}."
    return InvalidArgument(told, field=field, code="unsupported_value")
