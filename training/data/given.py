"""The user's own prompts and conversations, from JSONL files; their answers are made anew by the target.

A line is a conversation: `messages` (OpenAI), `conversations` (ShareGPT), `turns` (MT-bench), `prompt`, or a string.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.errors import StartupError
from outrider.flags import is_text
from training.chat_format import Message
from training.data.jsonl import WrongLine, read_values, said_as, wrong

_ROLES = {"human": "user", "user": "user", "system": "system", "developer": "system"}
_ANSWERING = frozenset(("gpt", "assistant", "tool", "function"))  # whose messages the target's own take the place of
_KEYS = ("messages", "conversations", "turns", "prompt")


def read_conversations(path: Path) -> list[list[Message]]:
    """What each line asks. StartupError for a file without any, and for a line that is no conversation."""
    return [messages for _, messages in _read(path)]


def read_first_turns(path: Path) -> list[tuple[str, list[Message]]]:
    """Category of each conversation (`all` where the line has none), and its opening. Errors as read_conversations."""
    return [
        (str(value.get("category", "all")) if isinstance(value, dict) else "all", opening(messages))
        for value, messages in _read(path)
    ]


def opening(messages: Sequence[Message]) -> list[Message]:
    """A conversation's system message, which counts where it comes first, and what the user says first."""
    asked = next(message for message in messages if message["role"] == "user")
    return [*system_of(messages), asked]


def system_of(messages: Sequence[Message]) -> list[Message]:
    """The system message that a conversation begins with, if it does."""
    return [message for message in messages[:1] if message["role"] == "system"]


def _read(path: Path) -> list[tuple[Any, list[Message]]]:
    """Each line's value, and its messages, of which one at least is a user's."""
    found = []
    for number, value in read_values(path):
        try:
            found.append((value, _messages(value)))
        except WrongLine as error:
            raise wrong(path, number, error) from error
    if not found:
        raise StartupError(f"{path} holds no prompts")
    return found


def _messages(value: Any) -> list[Message]:
    if isinstance(value, str):
        return [_from_user(value, "the prompt")]
    if not isinstance(value, dict):
        raise WrongLine(f"it is {said_as(value)}; it must be a string, or an object with one of {', '.join(_KEYS)}")
    for key in ("messages", "conversations"):
        if key in value:
            read = [_message(item, f"{key}[{index}]") for index, item in enumerate(_list(value[key], key))]
            messages = [message for message in read if message is not None]
            if not any(message["role"] == "user" for message in messages):
                raise WrongLine(f"{key} has no message of a user; it must have one")
            return messages
    return _turns(value)


def _turns(value: dict[str, Any]) -> list[Message]:
    if "turns" in value:
        return [_from_user(turn, f"turns[{index}]") for index, turn in enumerate(_list(value["turns"], "turns"))]
    if "prompt" not in value:
        raise WrongLine(f"it has none of {', '.join(_KEYS)}")
    return [_from_user(value["prompt"], "prompt")]


def _message(item: Any, name: str) -> Message | None:
    """The message; None for one that answers."""
    if not isinstance(item, dict):
        raise WrongLine(f"{name} is {said_as(item)}; it must be an object with a role and a text")
    role = item.get("role", item.get("from"))
    if isinstance(role, str) and role in _ANSWERING:
        return None
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join((*_ROLES, *sorted(_ANSWERING)))
        raise WrongLine(f"{name} has the role {_shown(role)}; it must be one of {known}")
    key = "value" if "content" not in item and ("value" in item or "from" in item) else "content"
    if key not in item:
        raise WrongLine(f"{name} has no {key}")
    return {"role": _ROLES[role], "content": _text(_joined(item[key], f"{name}.{key}"), f"{name}.{key}")}


def _from_user(value: Any, name: str) -> Message:
    return {"role": "user", "content": _text(value, name)}


def _joined(content: Any, name: str) -> Any:
    """OpenAI's list of text parts as one text; anything else as it is."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise WrongLine(f"{name} has a part that is no text; all must be of type `text`")
    return "".join(part["text"] for part in content)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise WrongLine(f"{name} is {said_as(value)}; it must be a string")
    if not value.strip():
        raise WrongLine(f"{name} is empty; it must be a text")
    if not is_text(value):
        raise WrongLine(f"{name} is not Unicode text: it has half of a surrogate pair")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise WrongLine(
            f"{name} is {'empty' if value == [] else said_as(value)}; it must be a list with something in it"
        )
    return value


def _shown(role: Any) -> str:
    return f"{role[:40]!a}" if isinstance(role, str) else said_as(role)
