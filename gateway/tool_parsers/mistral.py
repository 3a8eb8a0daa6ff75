"""Mistral's calls: `[TOOL_CALLS]` and then a list of objects (its first models) or a header each (its later ones)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gateway.message_parts import Content, Part, split_at, taken
from gateway.tool_parsers.tagged import TagForm, TaggedCalls
from gateway.tool_schemas import NAME_PATTERN

BEGIN = "[TOOL_CALLS]"
_HEADER = re.compile(rf"(?P<name>{NAME_PATTERN})(?:\[CALL_ID\][a-zA-Z0-9]*)?(?:\[ARGS\])?\s*(?=\{{)")
_LIST = TagForm(BEGIN, ("[", ",", "]"))
_HEADED = TagForm(BEGIN, header=_HEADER)
MARKERS = frozenset((BEGIN, "[ARGS]", "[CALL_ID]"))


class MistralCalls:
    """The parser of one choice's text; the character after the first mark tells which of the two forms it is."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held: list[str] = []  # white space before the mark; after it, the mark as well
        self._tail = ""  # that may begin the mark
        self._marked = False
        self._inner: TaggedCalls | None = None

    def push(self, text: str) -> Iterable[Part]:
        """Parts as they become certain."""
        if self._inner is not None:
            return self._inner.push(text)
        made: list[Part] = []
        if not self._marked:
            content, self._marked, text = split_at(self._tail + text, BEGIN)
            kept = content.rstrip()
            made += [Content(taken(self._held) + kept)] if kept else []
            self._held.append(content[len(kept) :])
            if not self._marked:
                self._tail = text
                return made
            self._tail = ""
            self._held.append(BEGIN)
        self._held.append(text)
        if after := text.lstrip():
            self._inner = TaggedCalls(_LIST if after[0] == "[" else _HEADED, self._names)
            made += self._inner.push(taken(self._held))
        return made

    def finish(self) -> Iterable[Part]:
        """What was held back."""
        if self._inner is not None:
            return self._inner.finish()
        held = taken(self._held) + self._tail
        return [Content(held)] if held else []
