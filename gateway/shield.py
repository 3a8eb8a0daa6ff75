"""Keeps users' text from becoming control tokens, without changing how ordinary text is tokenised.

A chat template mixes its own control tokens (`<|im_start|>`) with users' text in one string, and tokenizers find
control tokens anywhere in it. Separating the text before the template runs would change its tokens, since merges go
across the seam ("user\\n" + "\\nhi"). So: (1) before rendering, each character of users' text that could begin a
control token is replaced by a stand-in of the same length that occurs nowhere in the request; (2) in the rendered
text, what still spells a control token is the template's own; (3) those become nonces that only this process knows,
and the stand-ins become the characters again; (4) a copy of the tokenizer that knows the nonces and no control tokens
encodes the whole. Strings that the template itself looks for (`</think>`) are left alone, so that it finds them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any

from outrider.errors import InvalidArgument

_PRIVATE = re.compile("[\ue000-\uf8ff]")
_FIRST_PRIVATE, _LAST_PRIVATE = 0xE000, 0xF8FF


class Shield:
    """The rule for one model: its control tokens, its template, and the strings that the template compares with."""

    def __init__(self, control: Iterable[str], template_strings: Iterable[str], template_source: str) -> None:
        self._control = sorted((text for text in control if text), key=len, reverse=True)
        self._firsts = sorted({text[0] for text in self._control})
        first_class = "[" + re.escape("".join(self._firsts)) + "]" if self._firsts else r"(?!)"
        self._any_first = re.compile(first_class)
        kept = sorted(filter(self._worth_keeping, set(template_strings)), key=len, reverse=True)
        self._cover = re.compile("|".join([*map(re.escape, kept), first_class]))
        self._reserved = frozenset(_PRIVATE.findall(template_source))
        self._find = re.compile("|".join(map(re.escape, self._control)) or r"(?!)")

    def _worth_keeping(self, text: str) -> bool:
        """Whether covering would touch `text`, and no control token can begin in it, wherever it may end."""
        if len(text) < 2 or not self._any_first.search(text):
            return False
        tails = (text[match.start() :] for match in self._any_first.finditer(text))
        return not any(
            control.startswith(tail) or tail.startswith(control) for tail in tails for control in self._control
        )

    def covering(self, *values: Any) -> Cover:
        """A cover for one request, whose stand-ins occur in none of `values`."""
        used = set(self._reserved)
        for text in strings_of(values):
            used.update(_PRIVATE.findall(text))
        free = (chr(code) for code in range(_FIRST_PRIVATE, _LAST_PRIVATE + 1) if chr(code) not in used)
        stand_ins = list(itertools.islice(free, len(self._firsts) + 1))
        if len(stand_ins) <= len(self._firsts):
            raise InvalidArgument(
                "The text uses up the private-use characters.", field="messages", code="invalid_value"
            )
        return Cover(self, dict(zip(self._firsts, stand_ins, strict=False)), end=stand_ins[-1])

    def cover(self, text: str, table: dict[str, str]) -> str:
        """`text` with its risky characters replaced by `table`."""
        if not self._any_first.search(text):
            return text
        return self._cover.sub(lambda match: table.get(match.group(), match.group()), text)

    def mark(self, text: str, nonces: dict[str, str]) -> str:
        """`text` with each control token in it replaced by its nonce."""
        return self._find.sub(lambda match: nonces[match.group()], text)


class Cover:
    """One request's stand-ins. `end` is one more character that occurs nowhere: a mark to cut at."""

    def __init__(self, shield: Shield, table: dict[str, str], *, end: str) -> None:
        self._shield = shield
        self._table = table
        self._back = {ord(stand_in): first for first, stand_in in table.items()}
        self.end = end

    def cover(self, value: Any) -> Any:
        """`value` (JSON-like) with every string in it covered, keys too."""
        if isinstance(value, str):
            return self._shield.cover(value, self._table)
        if isinstance(value, dict):
            return {self.cover(key): self.cover(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.cover(item) for item in value]
        return value

    def uncover(self, text: str) -> str:
        """The characters back in place of their stand-ins."""
        return text.translate(self._back)

    def mark_control(self, rendered: str, nonces: dict[str, str]) -> str:
        """Rendered text, uncovered, with the template's control tokens as their nonces."""
        return self.uncover(self._shield.mark(rendered, nonces))


def strings_of(value: Any) -> Iterable[str]:
    """Every string in a JSON-like value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from strings_of(key)
            yield from strings_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_of(item)
