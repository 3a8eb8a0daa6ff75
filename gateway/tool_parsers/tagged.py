"""Calls between marks: JSON objects with name and arguments, or a header with the name and then the arguments.

What looks like a call and is none (no JSON, a function that was not offered) stays text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gateway.parts import CallArguments, CallBegin, Content, Part, split_at
from gateway.tool_parsers.scanner import ArgumentScanner, CallScanner, NotACall

_MAX_HEADER_CHARS = 300


@dataclass(frozen=True, slots=True)
class TagForm:
    """One format.

    `begin` opens calls; without it (None) calls are the whole output, or none are. `fillers` may stand around calls, as
    may white space. `header` matches what leads to the arguments, with the group `name`; without it calls are objects.
    `header_begin` is how a header after the first begins. `may_begin` is a mark that the output may begin with.
    """

    begin: str | None
    fillers: tuple[str, ...] = ()
    header: re.Pattern[str] | None = None
    header_begin: str | None = None
    may_begin: str | None = None
    within_header: tuple[str, ...] = ()  # marks that stand in it

    @property
    def markers(self) -> frozenset[str]:
        """Strings that must come out of the detokenizer, control tokens though they may be."""
        found = (self.begin, self.may_begin, self.header_begin, *self.fillers, *self.within_header)
        return frozenset(text for text in found if text)


class TaggedCalls:
    """One choice's text. `names` are the functions that were offered."""

    def __init__(self, form: TagForm, names: frozenset[str]) -> None:
        self._form = form
        self._names = names
        self._state = "text" if form.begin is not None else "start"
        self._held = ""
        self._raw = ""  # taken since the last thing that was told; text again when no call comes of it
        self._expecting = True  # a call must come next
        self._index = -1
        self._call: CallScanner | ArgumentScanner | None = None
        self._told_name = False
        self._header_name = ""

    def push(self, text: str) -> Iterator[Part]:
        """Parts as they become certain."""
        text, self._held = self._held + text, ""
        while text:
            if self._state == "start":
                text = self._start(text)
            elif self._state == "gap":
                text, left = self._gap(text)
                if left is not None:
                    yield Content(left)
            elif self._state == "call":
                made, text = self._body(text)
                yield from made
            else:
                made, text = self._text(text)
                yield from made

    def finish(self) -> Iterator[Part]:
        """What was held back and never became a call."""
        held = self._held
        if self._state in ("gap", "call") and not self._told_name:
            held = (self._raw + held) if self._expecting else held
        elif self._state == "call":
            held = ""
        if held.strip():
            yield Content(held)
        self._held = self._raw = ""

    def _start(self, text: str) -> str:
        """Whether the whole output is calls: known at its first characters."""
        stripped = text.lstrip()
        mark = self._form.may_begin
        if mark is not None and stripped.startswith(mark):
            self._open(mark)
            return stripped[len(mark) :]
        if not stripped or (mark is not None and mark.startswith(stripped)):
            self._held = text
            return ""
        if stripped[0] == "{" or any(stripped.startswith(filler) for filler in self._form.fillers):
            self._open("")
        else:
            self._state = "plain"
        return text

    def _open(self, mark: str) -> None:
        self._state, self._expecting, self._raw = "gap", True, mark

    def _text(self, text: str) -> tuple[list[Part], str]:
        """Content up to the mark. White space is kept back: before a call it is the format's."""
        begin = self._form.begin
        if begin is None:
            return [Content(text)], ""
        content, found, rest = split_at(text, begin)
        kept = content.rstrip()
        made: list[Part] = [Content(kept)] if kept else []
        if found:
            self._open(begin)
            return made, rest
        self._held = content[len(kept) :] + rest
        return made, ""

    def _gap(self, text: str) -> tuple[str, str | None]:
        """Past what may stand around calls, to the next one; the text that is none, where nothing follows."""
        text, waiting = self._skip(text)
        if waiting or not text:
            self._held = text
            return "", None
        form = self._form
        if form.header is None:
            if text[0] == "{":
                self._call, self._state, self._told_name = CallScanner(), "call", False
                return text, None
        elif self._expecting or (form.header_begin and text.startswith(form.header_begin)):
            if match := form.header.match(text):
                self._raw += match.group()
                if match["name"] in self._names:
                    self._call, self._state, self._told_name = ArgumentScanner(), "call", False
                    self._header_name = match["name"]
                    return text[match.end() :], None
                text = text[match.end() :]
            elif len(text) < _MAX_HEADER_CHARS:
                self._held = text
                return "", None
        left = self._raw if self._expecting else ""
        self._state, self._raw = ("text" if form.begin is not None else "plain"), ""
        return text, left or None

    def _skip(self, text: str) -> tuple[str, bool]:
        """Without fillers at its beginning; and whether it may be the beginning of one."""
        marks = (*self._form.fillers, *((self._form.begin,) if self._form.begin else ()))
        waited_for = marks if self._expecting else (*marks, self._form.header_begin or "")
        while True:
            stripped = text.lstrip()
            self._raw += text[: len(text) - len(stripped)]
            text = stripped
            mark = next((mark for mark in marks if text.startswith(mark)), None)
            if mark is None:
                return text, any(mark.startswith(text) and mark != text for mark in waited_for)
            if mark == self._form.begin:
                self._expecting, self._raw = True, ""
            self._raw += mark
            text = text[len(mark) :]

    def _body(self, text: str) -> tuple[list[Part], str]:
        """More of a call."""
        assert self._call is not None
        made: list[Part] = []
        if isinstance(self._call, ArgumentScanner) and not self._told_name:
            made.append(self._begin(self._header_name))
        try:
            size, arguments = self._call.push(text)
            if isinstance(self._call, CallScanner) and not self._told_name and self._call.name is not None:
                if self._call.name not in self._names:
                    raise NotACall
                made.append(self._begin(self._call.name))
        except NotACall:
            return [*made, *self._not_a_call(text)], ""
        if arguments:
            made.append(CallArguments(self._index, arguments))
        self._raw += text[:size]
        if self._call.done:
            self._state, self._call, self._raw, self._expecting = "gap", None, "", False
            self._told_name = False
        return made, text[size:]

    def _begin(self, name: str) -> Part:
        self._index += 1
        self._told_name = True
        return CallBegin(self._index, name)

    def _not_a_call(self, text: str) -> list[Part]:
        """What was taken for one is text again; where its name was told, the rest of it is dropped."""
        raw = "" if self._told_name else self._raw + text
        self._state, self._call, self._raw, self._told_name = "text", None, "", False
        if self._form.begin is None:
            self._state = "plain"
        return [Content(raw)] if raw else []
