"""Calls as Qwen3-Coder writes them: `<tool_call><function=f><parameter=a>\\n1\\n</parameter></function></tool_call>`.

Values are bare text; the function's schema tells which of them are JSON. What is not the format stays text, and text
goes on from there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.message_parts import CallArguments, CallBegin, Content, Part, begins_mark, split_at, taken
from gateway.tool_parsers.scanner import MAX_HELD_CHARS
from gateway.tool_parsers.xml_values import Parameters

BEGIN = "<tool_call>"
MARKERS = frozenset((BEGIN, "</tool_call>"))
_MARKS = ("<function=", "<parameter=", "</function>", "</tool_call>")
_VALUE_END = "</parameter>"


@dataclass(slots=True)
class _Awaited:
    """A mark in text that comes in pieces, each of which is looked through once."""

    mark: str
    num_left: int  # characters within which it must come
    tail: str  # of the text before: the mark may begin there

    def has_come(self, text: str) -> bool:
        """Whether `text` completes the mark, or is too much."""
        self.num_left -= len(text)
        seen = self.tail + text
        self.tail = seen[-len(self.mark) :]
        return self.mark in seen or self.num_left <= 0


class XmlCalls:
    """One choice's text; a parameter is told when it has ended. `schemas` are those of the functions offered."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._functions = {name: Parameters(schema) for name, schema in schemas.items()}
        self._held: list[str] = []  # the beginning of a mark, or of an element
        self._awaited: _Awaited | None = None  # what ends it
        self._inside = False
        self._raw: list[str] = []  # since the mark, until a function is called: text again when none is
        self._index = -1
        self._name: str | None = None
        self._num_parameters = 0
        self._between = False  # a call has ended, and no text has come since

    def push(self, text: str) -> Iterator[Part]:
        """Parts as they become certain."""
        self._held.append(text)
        if self._awaited is not None and not self._awaited.has_come(text):
            return
        text, self._awaited = taken(self._held), None
        while text:
            if not self._inside:
                content, found, text = split_at(text, BEGIN)
                kept = content.rstrip()
                space = content[len(kept) :]
                if kept:
                    self._between = False
                    yield Content(taken(self._raw) + kept)
                self._raw.append(space)
                if not found:
                    self._held.append(text)
                    return
                if self._between:
                    self._raw.clear()
                self._inside = True
                self._raw.append(BEGIN)
                continue
            stripped = text.lstrip()
            self._pass(text[: len(text) - len(stripped)])
            made, rest = self._step(stripped)
            yield from made
            if rest is None:
                self._held.append(stripped)
                return
            text = rest

    def finish(self) -> Iterator[Part]:
        """A call that was cut stays as it is; text that was held comes out, but for what is the format's after one."""
        begun = taken(self._held)
        held = taken(self._raw) + begun
        is_the_formats = self._between and (not held.strip() or begins_mark(begun, (BEGIN, *_MARKS)))
        if self._name is None and held and not is_the_formats:
            yield Content(held)
        self._name = None

    def _pass(self, text: str) -> None:
        """Passes over what may stand around calls: after one it is the format's and never text."""
        if self._raw:
            self._raw.append(text)

    def _step(self, text: str) -> tuple[list[Part], str | None]:
        """One element at the beginning of `text`, and what follows it; None when it is not complete yet."""
        mark = next((mark for mark in _MARKS if text.startswith(mark)), None)
        if mark is None:
            if any(mark.startswith(text) for mark in _MARKS):
                return [], None
            return self._leave(), text
        after = text[len(mark) :]
        if mark == "</tool_call>":
            self._pass(mark)
            return self._leave(), after
        if mark == "</function>":
            self._pass(mark)
            return self._close(), after
        # Limits are those of what has been looked through, not of what has come: pieces are of any size.
        end = after.find(">", 0, MAX_HELD_CHARS)
        if end < 0:
            return self._await(">", after, text)
        name, rest = after[:end], after[end + 1 :]
        if mark == "<function=":
            return self._open(name, text, rest)
        return self._parameter(name, text, rest)

    def _await(self, mark: str, looked_through: str, text: str) -> tuple[list[Part], str | None]:
        """Waits for the mark that ends an element, if not too much has come without it."""
        num_left = MAX_HELD_CHARS - len(looked_through)
        if num_left <= 0:
            return self._leave(), text
        self._awaited = _Awaited(mark, num_left, text[-len(mark) :])
        return [], None

    def _open(self, name: str, text: str, rest: str) -> tuple[list[Part], str | None]:
        if name not in self._functions:
            return self._leave(), text
        made = self._close()
        self._index += 1
        self._name, self._num_parameters = name, 0
        self._raw.clear()
        return [*made, CallBegin(self._index, name), CallArguments(self._index, "{")], rest

    def _parameter(self, key: str, text: str, rest: str) -> tuple[list[Part], str | None]:
        if self._name is None:
            return self._leave(), text
        end = rest.find(_VALUE_END, 0, MAX_HELD_CHARS)
        if end < 0:
            return self._await(_VALUE_END, rest, text)
        value = rest[:end].removeprefix("\n").removesuffix("\n")
        pair = f"{json.dumps(key, ensure_ascii=False)}: {self._functions[self._name].as_json(key, value)}"
        comma = ", " if self._num_parameters else ""
        self._num_parameters += 1
        return [CallArguments(self._index, comma + pair)], rest[end + len(_VALUE_END) :]

    def _close(self) -> list[Part]:
        if self._name is None:
            return []
        self._name, self._between = None, True
        return [CallArguments(self._index, "}")]

    def _leave(self) -> list[Part]:
        """Goes back to text, with what no call came of."""
        raw, self._inside = taken(self._raw), False
        self._between = self._between and not raw
        return [*self._close(), *([Content(raw)] if raw else [])]
