"""Calls as Qwen3-Coder writes them: `<tool_call><function=f><parameter=a>\\n1\\n</parameter></function></tool_call>`.

Values are bare text; the function's schema tells which of them are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.parts import CallArguments, CallBegin, Content, Part, split_at

BEGIN = "<tool_call>"
MARKERS = frozenset((BEGIN, "</tool_call>"))
_MARKS = ("<function=", "<parameter=", "</function>", "</tool_call>")
_MAX_HELD_CHARS = 256 * 1024


class XmlCalls:
    """One choice's text; a parameter is told when it has ended. `schemas` are those of the functions offered."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas = schemas
        self._held = ""
        self._inside = False
        self._called = False  # since the mark
        self._index = -1
        self._name: str | None = None
        self._num_parameters = 0

    def push(self, text: str) -> Iterator[Part]:
        """Parts as they become certain."""
        text, self._held = self._held + text, ""
        while text:
            if not self._inside:
                content, found, text = split_at(text, BEGIN)
                kept = content.rstrip()
                if kept:
                    yield Content(kept)
                if not found:
                    self._held = content[len(kept) :] + text
                    return
                self._inside, self._called = True, False
                continue
            made, rest = self._step(text.lstrip())
            yield from made
            if rest is None:
                self._held = text.lstrip()
                return
            text = rest

    def finish(self) -> Iterator[Part]:
        """A call that was cut stays as it is; text that was held comes out."""
        if self._name is not None:
            self._name = None
        elif self._held.strip() or (self._inside and not self._called):
            yield Content((BEGIN if self._inside and not self._called else "") + self._held)
        self._held = ""

    def _step(self, text: str) -> tuple[list[Part], str | None]:
        """One element at the beginning of `text`, and what follows it; None when it is not complete yet."""
        mark = next((mark for mark in _MARKS if text.startswith(mark)), None)
        if mark is None:
            if any(mark.startswith(text) for mark in _MARKS):
                return [], None
            return self._leave(text), ""
        after = text[len(mark) :]
        if mark == "</tool_call>":
            self._inside = False
            return self._close(), after
        if mark == "</function>":
            return self._close(), after
        name, found, rest = after.partition(">")
        if not found:
            return ([], None) if len(after) < _MAX_HELD_CHARS else (self._leave(text), "")
        if mark == "<function=":
            return self._open(name, text, rest)
        return self._parameter(name, text, rest)

    def _open(self, name: str, text: str, rest: str) -> tuple[list[Part], str | None]:
        if name not in self._schemas:
            return self._leave(text), ""
        made = self._close()
        self._index += 1
        self._called = True
        self._name, self._num_parameters = name, 0
        return [*made, CallBegin(self._index, name), CallArguments(self._index, "{")], rest

    def _parameter(self, key: str, text: str, rest: str) -> tuple[list[Part], str | None]:
        value, found, after = rest.partition("</parameter>")
        if self._name is None or (not found and len(rest) > _MAX_HELD_CHARS):
            return self._leave(text), ""
        if not found:
            return [], None
        value = value.removeprefix("\n").removesuffix("\n")
        pair = f"{json.dumps(key, ensure_ascii=False)}: {self._as_json(key, value)}"
        comma = ", " if self._num_parameters else ""
        self._num_parameters += 1
        return [CallArguments(self._index, comma + pair)], after

    def _as_json(self, key: str, value: str) -> str:
        assert self._name is not None
        schema = self._schemas[self._name].get("properties", {})
        kind = schema.get(key, {}).get("type") if isinstance(schema.get(key), Mapping) else None
        if kind != "string":
            try:
                return json.dumps(json.loads(value), ensure_ascii=False, allow_nan=False)
            except (ValueError, RecursionError):
                pass
        return json.dumps(value, ensure_ascii=False)

    def _close(self) -> list[Part]:
        if self._name is None:
            return []
        self._name = None
        return [CallArguments(self._index, "}")]

    def _leave(self, text: str) -> list[Part]:
        """Not the format: text again."""
        self._inside = False
        made = self._close()
        return [*made, Content(text if made else BEGIN + text)]
