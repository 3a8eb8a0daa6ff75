"""Patterns of JSON schemas, ECMA-262's, as verify's grammars can have them: in the syntax of Rust's, and regular."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise

# A backslash and what belongs to it: two surrogates are one character, and what braces are is not looked at.
_ESCAPE = r"\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|\\[pPux]\{\w+\}|\\."
# Of a pattern, so that what a backslash or a class makes an ordinary character is not taken for anything else; and
# braces that repeat nothing.
_PARTS = re.compile(rf"{_ESCAPE}|\[\^?\]?(?:[^\]\\]|\\.)*\]?|\(\?(?:<?[=!]|>|P=)|\{{(?!\d+(?:,\d*)?\}})", re.DOTALL)
_OF_CLASS = re.compile(rf"({_ESCAPE}|[^\]\\])(?:-({_ESCAPE}|[^\]\\]))?", re.DOTALL)  # a character, or a range
_SETS = frozenset("[-&~")  # stand for sets within a class of Rust's
_UNSAYABLE_ESCAPES = frozenset("\\" + char for char in "bB123456789kcZ")  # back, around, or no known one
_WORD = re.compile(r"\^([\w -]+)\$?")
_PAIR_CHARS = 12  # of two surrogates


def is_regular(pattern: str) -> bool:
    """Whether it does not look around or back, nor is anything else that a pattern is more than regular with."""
    return not any(part[:2] == "(?" or part in _UNSAYABLE_ESCAPES for part in _PARTS.findall(pattern))


def in_rust(pattern: str) -> str:
    """The same in Rust's syntax, where characters have a meaning that are plain in ECMA-262."""
    return _PARTS.sub(lambda found: _part_in_rust(found[0]), pattern)


def _part_in_rust(part: str) -> str:
    if part == "{":
        return r"\{"
    if part[0] != "[":
        return _one_char(part)
    opening = "[^" if part[:2] == "[^" else "["
    inside = _OF_CLASS.sub(
        lambda found: "-".join(_of_class(end) for end in found.groups() if end), part[len(opening) :]
    )
    return opening + inside


def _of_class(part: str) -> str:
    return "\\" + part if part in _SETS else _one_char(part)


def _one_char(escape: str) -> str:
    return json.loads(f'"{escape}"') if len(escape) == _PAIR_CHARS and escape[:2] == r"\u" else escape


def are_apart(patterns: Sequence[str]) -> bool:
    """Whether it is plain that no text matches two of them: each is a beginning, of which no other is the beginning."""
    words = sorted(found[1] if (found := _WORD.fullmatch(pattern)) else "" for pattern in patterns)
    return not any(word.startswith(last) for last, word in pairwise(words))
