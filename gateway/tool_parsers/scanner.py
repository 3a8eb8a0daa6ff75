"""Calls written as JSON objects, read as they come: the name first, then the arguments piece by piece.

`{"name": "f", "arguments": {...}}`, the keys in any order; what stands beside them is passed over. Arguments are an
object: where a call that was told by its name has none, they are `{}`.
"""

from __future__ import annotations

import json
from typing import Literal, NoReturn

from gateway.message_parts import taken
from gateway.tool_parsers.json_text import encodable

NAME_KEYS = ("name",)
ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"
MAX_HELD_CHARS = 256 * 1024


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

    @property
    def is_scalar(self) -> bool:
        """Whether the value is a number or a word, whose end only what follows tells."""
        return self._kind == "scalar"

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


def is_whole(arguments: str) -> bool:
    """Whether a call's arguments have come to their end: brackets and strings tell, since no more is checked above."""
    value = ValueScanner()
    try:
        for char in arguments:
            value.push(char)
            if value.done:
                return True
    except NotACall:
        return False
    return value.is_scalar


class CallScanner:
    """One call. `push` gives arguments as they come once the name is known.

    `done` when the object has closed; `failed` when a character came that no call has there; then `lacks_brace` when
    the object's last brace would have been right there.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        self.failed = self.lacks_brace = False
        self._num_taken = 0
        self._state: Literal["open", "key", "colon", "value", "comma"] = "open"
        self._key = ""
        self._value: ValueScanner | None = None
        self._text: list[str] = []  # of the key or value being read, but for arguments that are told as they come
        self._streams = False  # whether it is these
        self._arguments: list[str] = []  # not told yet
        self._has_arguments = False

    def push(self, text: str) -> tuple[int, str]:
        """Takes characters: how many, and the arguments to tell.

        It stops after the name and after the object's end, and before the character where it fails: what follows from
        these must not wait for, nor depend on, what else has come.
        """
        told = ""
        for index, char in enumerate(text):
            named = self.name is not None
            try:
                self._take(char)
            except NotACall:
                self.failed = True
                self.lacks_brace = self.name is not None and self._state == "comma"
                self._end_arguments()
                return index, told + self._tell()
            told += self._tell()
            if self.done or named != (self.name is not None):
                return index + 1, told
        return len(text), told

    def _tell(self) -> str:
        if self.name is None or not self._arguments:
            return ""
        return taken(self._arguments)

    def _take(self, char: str) -> None:
        self._num_taken += 1
        if self.name is None and self._num_taken > MAX_HELD_CHARS:
            raise NotACall
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
            self._end_arguments()
            self.done = True
        else:
            raise NotACall

    def _in_value(self, char: str) -> None:
        if self._value is None:
            if char in _SPACE:
                return
            self._value, self._streams = ValueScanner(), char == "{" and self._is_arguments()
            self._has_arguments |= self._streams
        is_part = self._value.push(char)
        if is_part:
            (self._arguments if self._streams else self._text).append(char)
        if self._value.done:
            self._end_value()
            if not is_part:
                self._take(char)

    def _end_value(self) -> None:
        text, self._value, self._streams = taken(self._text), None, False
        if self._state == "key":
            self._key, self._state = _string(text), "colon"
            return
        self._state = "comma"
        if self._key in NAME_KEYS and self.name is None:
            self.name = _string(text)
        elif self._is_arguments():
            self._arguments.append(_object_in(text))
            self._has_arguments = True

    def _is_arguments(self) -> bool:
        """Whether the value is the arguments: the first that has one of their keys."""
        return self._key in ARGUMENT_KEYS and not self._has_arguments

    def _end_arguments(self) -> None:
        if not self._has_arguments:
            self._arguments.append("{}")


def _string(text: str) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise NotACall from None
    if not isinstance(value, str):
        raise NotACall
    return encodable(value)


def _object_in(text: str) -> str:
    """The object that models write as a JSON string; `{}` where the value is anything else."""
    try:
        inner = _string(text)
        return inner if isinstance(json.loads(inner, parse_constant=_no_value), dict) else "{}"
    except (NotACall, ValueError, RecursionError):
        return "{}"


def _no_value(_: str) -> NoReturn:
    """For NaN and its like, which Python's reader takes."""
    raise NotACall


class ArgumentScanner:
    """Arguments alone, an object, where the format has told the name already. As CallScanner otherwise."""

    lacks_brace = False

    def __init__(self, name: str) -> None:
        self.name: str | None = name
        self.failed = False
        self._value = ValueScanner()

    @property
    def done(self) -> bool:
        """Whether the object has closed."""
        return self._value.done

    def push(self, text: str) -> tuple[int, str]:
        """Takes characters up to the object's end, or to one that cannot be in it: how many, and these."""
        for index, char in enumerate(text):
            try:
                self._value.push(char)
            except NotACall:
                self.failed = True
                return index, text[:index]
            if self._value.done:
                return index + 1, text[: index + 1]
        return len(text), text
