"""The user's own prompts and conversations, from JSONL files; their answers are made anew by the target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.errors import StartupError
from training.chat_format import Message

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def read_conversations(path: Path) -> list[list[Message]]:
    """One conversation a line: `messages` (OpenAI), `conversations` (ShareGPT), `turns`, `prompt`, or a string."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"prompts cannot be read from {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            messages = _messages(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StartupError(f"{path}, line {number} is no conversation: {error!r}") from error
        if any(message["role"] == "user" for message in messages):
            found.append(messages)
    return found


def _messages(value: Any) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    for key in ("messages", "conversations"):
        if key in value:
            return [
                {"role": _ROLES[item.get("role") or item["from"]], "content": str(item.get("content") or item["value"])}
                for item in value[key]
            ]
    turns = value["turns"] if "turns" in value else [value["prompt"]]
    return [{"role": "user", "content": str(turn)} for turn in turns]
