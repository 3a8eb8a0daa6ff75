"""Calls between marks: JSON objects with name and arguments, or a header with the name and then the arguments.

What looks like a call and is none (no JSON, a function that was not offered) stays text, and text goes on from there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gateway.message_parts import CallArguments, CallBegin, Content, Part, begins_mark, split_at, taken
from gateway.tool_parsers.scanner import ArgumentScanner, CallScanner

_MAX_HEADER_CHARS = 300
_STRAYS = "} \t\r\n"  # small models write a brace too many after a call: the format's, if that goes on behind it


@dataclass(frozen=True, slots=True)
class TagForm:
    """One format.

    `begin` opens calls; without it (None) calls are the whole output, or none are. `fillers` may stand around calls, as
    may white space. `header` matches what leads to the arguments, with the group `name`; without it calls are objects.
    `header_begin` is how a header after the first begins. `may_begin` is a mark that the output may begin with. Where
    `only_calls` is set a grammar lets nothing else come: what is held at the end is the beginning of a call.
    """

    begin: str | None
    fillers: tuple[str, ...] = ()
    header: re.Pattern[str] | None = None
    header_begin: str | None = None
    may_begin: str | None = None
    within_header: tuple[str, ...] = ()  # marks that stand in it
    only_calls: bool = False

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
        self._raw: list[str] = []  # taken and not told: text again when no call comes of it
        self._expecting = True  # a call must come next
        self._between = False  # a call has ended, and no text has come since
        self._index = -1
        self._call: CallScanner | ArgumentScanner | None = None
        self._told_name = False

    def push(self, text: str) -> Iterator[Part]:
        """Parts as they become certain."""
        text, self._held = self._held + text, ""
        while text:
            if self._state == "start":
                text = self._start(text)
            elif self._state == "gap":
                made, text = self._gap(text)
                yield from made
            elif self._state == "call":
                made, text = self._body(text)
                yield from made
            else:
                made, text = self._text(text)
                yield from made

    def finish(self) -> Iterator[Part]:
        """What was held back and never became a call, but for white space and a mark that was cut after one."""
        tail = self._held.lstrip(_STRAYS)
        is_cut_mark = self._state == "gap" and begins_mark(tail, self._form.markers)
        raw = taken(self._raw)
        is_the_formats = self._between and (is_cut_mark or not (raw + tail).strip())
        held = raw + self._held
        if held and not is_the_formats and not self._form.only_calls:
            yield Content(held)
        self._held = ""

    def _start(self, text: str) -> str:
        """Finds out whether the whole output is calls, by its first characters; what is left to read."""
        stripped = text.lstrip()
        self._raw.append(text[: len(text) - len(stripped)])
        mark = self._form.may_begin
        if mark is not None and stripped.startswith(mark):
            self._open(mark)
            return stripped[len(mark) :]
        if not stripped or (mark is not None and mark.startswith(stripped)):
            self._held = stripped
            return ""
        if stripped[0] == "{" or any(stripped.startswith(filler) for filler in self._form.fillers):
            self._open("")
            return stripped
        self._state = "plain"
        return taken(self._raw) + stripped

    def _open(self, mark: str) -> None:
        self._state, self._expecting = "gap", True
        self._raw.append(mark)

    def _text(self, text: str) -> tuple[list[Part], str]:
        """Content up to the mark. White space is kept back: before a call it is the format's, and else text."""
        begin = self._form.begin
        if begin is None:
            return [Content(text)], ""
        content, found, rest = split_at(text, begin)
        kept = content.rstrip()
        made: list[Part] = [Content(taken(self._raw) + kept)] if kept else []
        self._raw.append(content[len(kept) :])
        if found:
            self._open(begin)
            return made, rest
        self._held = rest
        return made, ""

    def _gap(self, text: str) -> tuple[list[Part], str]:
        """Goes past what may stand around calls, to the next one; back to text, where none follows."""
        text, waiting = self._skip(text)
        if waiting or not text:
            self._held = text
            return [], ""
        form = self._form
        if form.header is None:
            if text[0] == "{":
                self._call, self._state = CallScanner(), "call"
                return [], text
        elif self._expecting or (form.header_begin and text.startswith(form.header_begin)):
            if match := form.header.match(text, 0, _MAX_HEADER_CHARS):
                self._raw.append(match.group())
                text = text[match.end() :]
                if match["name"] in self._names:
                    self._call, self._state = ArgumentScanner(match["name"]), "call"
                    return [], text
            elif len(text) < _MAX_HEADER_CHARS:
                self._held = text
                return [], ""
        return self._leave(), text

    def _skip(self, text: str) -> tuple[str, bool]:
        """The text without fillers at its beginning; and whether it may be the beginning of one."""
        marks = (*((self._form.begin,) if self._form.begin else ()), *self._form.fillers)
        waited_for = marks if self._expecting else (*marks, self._form.header_begin or "")
        while True:
            stripped = text.lstrip()
            self._pass(text[: len(text) - len(stripped)])
            text = stripped
            if any(mark.startswith(text) and mark != text for mark in waited_for):
                return text, True
            mark = next((mark for mark in marks if text.startswith(mark)), None)
            if mark is None and not self._expecting and text.startswith("}"):
                rest = text.lstrip(_STRAYS)
                if self._goes_on(rest):
                    text = rest
                    continue
                return text, not rest or any(mark.startswith(rest) for mark in waited_for)
            if mark is None:
                return text, False
            if mark == self._form.begin:
                self._expecting = True
            self._pass(mark)
            text = text[len(mark) :]

    def _goes_on(self, text: str) -> bool:
        """Whether what follows a call belongs to its format, or is the next one."""
        marks = (self._form.begin, self._form.header_begin, *self._form.fillers, "" if self._form.header else "{")
        return any(mark and text.startswith(mark) for mark in marks)

    def _pass(self, text: str) -> None:
        """Passes over what may stand around calls: after one it is the format's and never text."""
        if self._expecting:
            self._raw.append(text)

    def _body(self, text: str) -> tuple[list[Part], str]:
        """Reads more of a call."""
        call = self._call
        assert call is not None
        size, arguments = call.push(text)
        made: list[Part] = []
        if not self._told_name:
            self._raw.append(text[:size])
            if call.name is not None and call.name not in self._names:
                return self._leave(), text[size:]
            if call.name is not None:
                self._index, self._told_name = self._index + 1, True
                self._raw.clear()
                made.append(CallBegin(self._index, call.name))
        if arguments:
            made.append(CallArguments(self._index, arguments))
        if call.failed and not call.lacks_brace:
            made += self._leave()
        elif call.done or call.failed:  # small models leave the last brace out
            self._state, self._call, self._told_name, self._expecting = "gap", None, False, False
            self._between = True
        return made, text[size:]

    def _leave(self) -> list[Part]:
        """Goes back to text, which what was not told of a call is, and what follows."""
        raw = taken(self._raw)
        self._state = "text" if self._form.begin is not None else "plain"
        self._call, self._told_name, self._between = None, False, False
        return [Content(raw)] if raw else []
