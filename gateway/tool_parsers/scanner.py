"""Calls written as JSON objects, read as they come: the name first, then the arguments piece by piece.

`{"name": "f", "arguments": {...}}`, the keys in any order; what stands beside them is passed over.
"""

from __future__ import annotations

import json
from typing import Literal

NAME_KEYS = ("name",)
ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"
_MAX_HELD_CHARS = 256 * 1024


class NotACall(Exception):
    """The text is no JSON object with a name."""


class ValueScanner:
    """Finds the end of one JSON value. It checks brackets and strings, not grammar."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._in_string = False
        self._escaped = False
        self._kind: Literal["", "string", "group", "scalar"] = ""
        self.done = False

    def push(self, char: str) -> bool:
        """Takes a character; False when it is no part of the value any more (only after a number or a word)."""
        if self._in_string:
            self._string(char)
        elif char == '"' and self._kind in ("", "group"):
            self._in_string, self._kind = True, self._kind or "string"
        elif char in "{[" and self._kind in ("", "group"):
            self._kind = "group"
            self._stack.append("}" if char == "{" else "]")
        elif self._kind == "group":
            if char in "}]":
                if char != self._stack.pop():
                    raise NotACall
                self.done = not self._stack
        elif char in ",}]" + _SPACE:
            if not self._kind:
                raise NotACall
            self.done = True
            return False
        else:
            self._kind = "scalar"
        return True

    def _string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            self.done = self._kind == "string"


class CallScanner:
    """One call. `push` gives arguments as they come once the name is known; `done` when the object has closed."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        self.raw = ""  # all that was taken, for when it is no call after all
        self._state: Literal["open", "key", "colon", "value", "comma"] = "open"
        self._key = ""
        self._text = ""  # of the key or value being read
        self._value: ValueScanner | None = None
        self._arguments = ""  # not told yet
        self._has_arguments = False

    def push(self, text: str) -> tuple[int, str]:
        """Takes characters up to the object's end: how many, and the arguments to tell. NotACall where it is none."""
        told = ""
        for index, char in enumerate(text):
            self._take(char)
            if self.done:
                self.raw += text[: index + 1]
                return index + 1, told + self._tell()
            told += self._tell()
        self.raw += text
        if len(self.raw) > _MAX_HELD_CHARS and self.name is None:
            raise NotACall
        return len(text), told

    def _tell(self) -> str:
        if self.name is None or not self._arguments:
            return ""
        told, self._arguments = self._arguments, ""
        return told

    def _take(self, char: str) -> None:
        if self._state == "value" or self._value is not None:
            self._in_value(char)
        elif char in _SPACE:
            return
        elif self._state == "open" and char == "{":
            self._state = "key"
        elif self._state == "key" and char == '"':
            self._value = ValueScanner()
            self._in_value(char)
        elif self._state == "colon" and char == ":":
            self._state = "value"
        elif self._state == "comma" and char == ",":
            self._state = "key"
        elif char == "}" and self._state in ("key", "comma") and self.name is not None:
            if not self._has_arguments:
                self._arguments = "{}"
            self.done = True
        else:
            raise NotACall

    def _in_value(self, char: str) -> None:
        if self._value is None:
            if char in _SPACE:
                return
            self._value, self._text = ValueScanner(), ""
        streaming = self._state == "value" and self._key in ARGUMENT_KEYS
        taken = self._value.push(char)
        if taken:
            self._text += char
            if streaming and self._text[0] == "{":
                self._arguments += char
        if self._value.done:
            self._end_value()
            if not taken:
                self._take(char)

    def _end_value(self) -> None:
        text, self._value, self._text = self._text, None, ""
        if self._state == "key":
            self._key, self._state = _string(text), "colon"
            return
        self._state = "comma"
        if self._key in NAME_KEYS and self.name is None:
            self.name = _string(text)
        elif self._key in ARGUMENT_KEYS:
            self._has_arguments = True
            if text[0] == '"':  # arguments as JSON within a string
                self._arguments += _string(text)
            elif text[0] != "{":
                self._arguments += "{}" if text == "null" else text


def _string(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        raise NotACall from None
    if not isinstance(value, str):
        raise NotACall
    return value


class ArgumentScanner:
    """Arguments alone, where the format has told the name already: one JSON value."""

    def __init__(self) -> None:
        self._value = ValueScanner()
        self._begun = False

    @property
    def done(self) -> bool:
        """Whether the value is complete."""
        return self._value.done

    def push(self, text: str) -> tuple[int, str]:
        """Takes characters up to the value's end: how many, and those that belong to it."""
        start = 0
        if not self._begun:
            start = len(text) - len(text.lstrip(_SPACE))
        for index in range(start, len(text)):
            self._begun = True
            if not self._value.push(text[index]):
                return index, text[start:index]
            if self._value.done:
                return index + 1, text[start : index + 1]
        return len(text), text[start:]
