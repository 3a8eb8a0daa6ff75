"""Conversations: the rules of OpenAI's messages, and their form for a chat template.

Nothing that a message points to is ever fetched.
"""

from __future__ import annotations

import json
from typing import Any

from gateway.body import strict_json
from gateway.error_values import missing, not_text
from gateway.json_schema import is_shallow
from gateway.schemas import ContentPart, Message
from gateway.tool_schemas import ToolCall
from outrider.errors import InvalidArgument


def to_template(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as templates take them: content one string, `developer` said as `system`. Errors name the path."""
    made = [_to_template(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if all(message.role == "assistant" for message in messages):
        raise InvalidArgument(
            "At least one message must not be the assistant's.", field="messages", code="invalid_value"
        )
    return made


def _to_template(message: Message, path: str) -> dict[str, Any]:
    if message.role == "tool" and not message.tool_call_id:
        raise missing(f"{path}.tool_call_id")
    if message.tool_calls and message.role != "assistant":
        raise InvalidArgument(
            "Only the assistant's messages have tool_calls.", field=f"{path}.tool_calls", code="invalid_value"
        )
    if message.function_call is not None:
        raise InvalidArgument(
            f"This server does not support '{path}.function_call'. Use `tool_calls`.",
            field=f"{path}.function_call", code="unsupported_value",
        )  # fmt: skip
    made: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    made["content"] = _content(message, path)
    beside = {
        "name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": _reasoning(message),
    }  # fmt: skip
    made |= {name: value for name, value in beside.items() if value is not None}
    if message.tool_calls:
        made["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return made


def _content(message: Message, path: str) -> str:
    content = message.content
    if content is None:
        beside = message.refusal is not None or _reasoning(message) is not None
        if message.role == "assistant" and (message.tool_calls or beside):
            return message.refusal or ""
        raise missing(f"{path}.content")
    if isinstance(content, str):
        return content
    if not content and message.role != "tool":  # which may have nothing to say
        raise InvalidArgument("Content must have a part.", field=f"{path}.content", code="empty_array")
    return text_of(content, f"{path}.content")


def _reasoning(message: Message) -> str | None:
    return message.reasoning if message.reasoning_content is None else message.reasoning_content


def text_of(parts: list[ContentPart], path: str) -> str:
    """The text of content parts, a line each; InvalidArgument for a part that is no text."""
    return "\n".join(_part_text(part, f"{path}[{index}]") for index, part in enumerate(parts))


def _part_text(part: ContentPart, path: str) -> str:
    if part.type not in ("text", "refusal"):
        raise not_text(part.type, f"{path}.type")
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise missing(f"{path}.{part.type}")
    return text


def _tool_call(call: ToolCall) -> dict[str, Any]:
    """Templates print arguments as an object where they are one, and one that can be written: a half of a surrogate
    pair has no UTF-8, and of an infinite number (`1e999`), a NaN or a repeated key something would be lost."""
    try:
        arguments = strict_json(call.function.arguments)
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict) or not is_shallow(arguments):
        arguments = call.function.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
