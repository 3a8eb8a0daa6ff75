"""The items of a /v1/responses request as the messages of a chat.

Calls of every kind are calls of functions here, and what came of them their results. An item that has nothing for this
model is left out; one that stands for what is kept elsewhere is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.error_values import missing, not_text, shown
from gateway.json_schema import is_shallow
from gateway.responses_schemas import InputContent, InputItem, InputPart, ResponsesRequest
from gateway.responses_tools import LeaveOut, joined
from gateway.schemas import ContentPart, Message
from gateway.tool_schemas import FunctionCall, ToolCall
from outrider.errors import InvalidArgument

_TEXT_TYPES = {"input_text": "text", "output_text": "text", "text": "text", "reasoning_text": "text",
               "summary_text": "text", "refusal": "refusal"}  # fmt: skip
# Calls of tools that are none of a function: what the model reads as their name, and the field with their arguments.
_CALLS = {
    "custom_tool_call": (None, "input"), "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"), "apply_patch_call": ("apply_patch", "operation"),
}  # fmt: skip
# The same of calls that have what came of them beside it, in the last field.
_WHOLE_CALLS = {
    "mcp_call": (None, "arguments", "output"), "code_interpreter_call": ("code_interpreter", "code", "outputs"),
    "file_search_call": ("file_search", "queries", "results"),
}  # fmt: skip
_OUTPUTS = frozenset((
    "function_call_output", "custom_tool_call_output", "local_shell_call_output", "shell_call_output",
    "apply_patch_call_output",
))  # fmt: skip
# Calls without what came of them, and what only the one who runs a tool reads.
_UNREAD = frozenset((
    "web_search_call", "tool_search_call", "tool_search_output", "mcp_list_tools", "mcp_approval_request",
    "mcp_approval_response",
))  # fmt: skip
_KEPT_ELSEWHERE = frozenset(("item_reference", "compaction", "compaction_summary"))


def messages_of(body: ResponsesRequest, leave_out: LeaveOut) -> list[Message]:
    """The chat's messages. InvalidArgument for items that are malformed or cannot be said."""
    made = _Conversation()
    if body.instructions:
        made.say(Message(role="developer", content=body.instructions))
    if isinstance(body.input, str):
        made.say(Message(role="user", content=body.input))
        return made.messages
    for index, item in enumerate(body.input):
        _add(made, item, f"input[{index}]", leave_out)
    return made.messages


@dataclass(slots=True)
class _Conversation:
    """Messages, and the reasoning that goes with the assistant's next one."""

    messages: list[Message] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)

    def say(self, message: Message) -> None:
        """Adds a message."""
        self.messages.append(message)
        self._reasoned()

    def call(self, id: str, name: str, arguments: str) -> None:
        """Adds a call. Those that follow one another, or the assistant's text, are one message."""
        call = ToolCall(id=id, function=FunctionCall(name=name, arguments=arguments))
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant":
            self.say(Message(role="assistant", tool_calls=[call]))
            return
        last.tool_calls = [*(last.tool_calls or ()), call]
        self._reasoned()

    def _reasoned(self) -> None:
        last = self.messages[-1]
        if self.reasoning and last.role == "assistant":
            said = last.reasoning_content  # before the text of a message that now has a call too
            last.reasoning_content = "\n".join(self.reasoning if said is None else [said, *self.reasoning])
            self.reasoning = []


def _add(made: _Conversation, item: InputItem, path: str, leave_out: LeaveOut) -> None:
    kind = _kind(item)
    if kind == "message":
        made.say(_message(item, path))
    elif kind == "function_call":
        call_id, name = _text(item, "call_id", path), _text(item, "name", path)
        made.call(call_id, joined(item.namespace, name), _text(item, "arguments", path))
    elif kind in _CALLS:
        name, arguments = _CALLS[kind]
        made.call(_call_id(item, path), _name(item, name, path), _arguments(item, arguments, path))
    elif kind in _OUTPUTS:
        made.say(Message(role="tool", tool_call_id=_call_id(item, path), content=_output(item, path)))
    elif kind == "reasoning":
        _add_reasoning(made, item, path, leave_out)
    elif kind in _UNREAD or (kind == "file_search_call" and item.results is None):
        leave_out(f"input.{kind}", _refusal(kind, path))
    elif kind in _WHOLE_CALLS:
        _add_whole_call(made, item, path)
    else:
        raise _refusal(kind, path)


def _kind(item: InputItem) -> str:
    """An item's type; what has only an `id` is a reference."""
    if item.type is not None:
        return item.type
    return "item_reference" if item.id is not None and item.role is None and item.content is None else "message"


def _refusal(kind: str, path: str) -> InvalidArgument:
    why = " It cannot read what is kept elsewhere; send the items themselves." if kind in _KEPT_ELSEWHERE else ""
    return InvalidArgument(
        f"This server does not take items of the type {shown(kind)}.{why}", field=f"{path}.type",
        code="unsupported_value",
    )  # fmt: skip


def _add_reasoning(made: _Conversation, item: InputItem, path: str, leave_out: LeaveOut) -> None:
    """Notes what can be read of an item; an encrypted one is its maker's."""
    content = item.content if isinstance(item.content, list) else []
    texts = [part.text for part in content or item.summary or [] if part.text]
    made.reasoning += texts
    if item.encrypted_content is not None and not texts:
        refusal = InvalidArgument(
            "This server cannot read encrypted reasoning.",
            field=f"{path}.encrypted_content", code="unsupported_value",
        )  # fmt: skip
        leave_out("input.reasoning.encrypted_content", refusal)


# ---- Messages


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
    return [_part(part, f"{path}[{index}]") for index, part in enumerate(content)]


def _part(part: InputPart, path: str) -> ContentPart:
    if part.type is None:
        raise missing(f"{path}.type")
    kind = _TEXT_TYPES.get(part.type)
    if kind is None:
        raise not_text(part.type, f"{path}.type")
    if getattr(part, kind) is None:
        raise missing(f"{path}.{kind}")
    return ContentPart(type=kind, text=part.text, refusal=part.refusal)


# ---- Calls


def _text(item: InputItem, name: str, path: str) -> str:
    value = getattr(item, name)
    if value is None:
        raise missing(f"{path}.{name}")
    if not isinstance(value, str):
        raise InvalidArgument(
            f"Invalid type for '{path}.{name}': expected `str`, got `object`.", field=f"{path}.{name}",
            code="invalid_type",
        )  # fmt: skip
    return value


def _call_id(item: InputItem, path: str) -> str:
    """The id of a call; OpenAI's local shell has it in `id` of what came of it."""
    if not item.call_id and item.type == "local_shell_call_output" and item.id:
        return item.id
    if not item.call_id:
        raise missing(f"{path}.call_id")
    return item.call_id


def _name(item: InputItem, name: str | None, path: str) -> str:
    return joined(item.namespace, _text(item, "name", path)) if name is None else name


def _arguments(item: InputItem, name: str, path: str) -> str:
    """What a call was given as the text of an object, by its own name if it is none."""
    value = getattr(item, name)
    if value is None and name != "code":  # of which OpenAI may have kept none
        raise missing(f"{path}.{name}")
    return _json(value if isinstance(value, dict) else {name: value}, f"{path}.{name}")


def _output(item: InputItem, path: str) -> str | list[ContentPart]:
    if item.type == "apply_patch_call_output" and item.output is None:
        return _text(item, "status", path)
    if item.output is None:
        raise missing(f"{path}.output")
    if item.type == "shell_call_output" and isinstance(item.output, list):
        parts = [{"stdout": part.stdout, "stderr": part.stderr, "outcome": part.outcome} for part in item.output]
        return _json(parts, f"{path}.output")
    return _content(item.output, f"{path}.output") if item.output else ""


def _add_whole_call(made: _Conversation, item: InputItem, path: str) -> None:
    """Adds a call, and what came of it where that is told."""
    name, given, came = _WHOLE_CALLS[_kind(item)]
    call_id = _text(item, "id", path)
    arguments = _text(item, given, path) if given == "arguments" else _arguments(item, given, path)
    made.call(call_id, _name(item, name, path), arguments)
    told = "error" if getattr(item, came) is None else came
    result = getattr(item, told)
    if result is not None:
        content = _json(result, f"{path}.{told}") if isinstance(result, dict | list) else str(result)
        made.say(Message(role="tool", tool_call_id=call_id, content=content))


def _json(value: Any, path: str) -> str:
    if not is_shallow(value):
        raise InvalidArgument(f"'{path}' is nested too deeply.", field=path, code="invalid_value")
    return msgspec.json.encode(value).decode()
