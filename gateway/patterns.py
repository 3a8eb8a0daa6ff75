"""Patterns of JSON schemas, ECMA-262's, as verify's grammars can have them: in the syntax of Rust's, and regular."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

_HEX = "[0-9a-fA-F]"
# A backslash and what belongs to it: two surrogates are one character, one alone is none. What braces are is not looked
# at.
_ESCAPE = (
    rf"\\u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}|\\u(?![dD][89a-fA-F]){_HEX}{{4}}|\\x{_HEX}{{2}}"
    r"|\\[pPux]\{[^{}]*\}|\\[pP][A-Z]|\\0[0-9]+|\\."
)
# Of a pattern, so that what a backslash or a class makes an ordinary character is not taken for anything else; and
# braces that repeat nothing.
_PARTS = re.compile(rf"{_ESCAPE}|\[\^?(?:[^\]\\]|\\.)*\]?|\(\?(?:<?[=!]|>|P=)|\{{(?!\d+(?:,\d*)?\}})", re.DOTALL)
_ESCAPES = re.compile(_ESCAPE, re.DOTALL)
_OF_CLASS = re.compile(rf"({_ESCAPE}|[^\]\\])(?:-({_ESCAPE}|[^\]\\]))?", re.DOTALL)  # a character, or a range
_TWICE = frozenset("-&~")  # stand for sets within a class of Rust's if there are two
_NEVER = r"[^\s\S]"
_CHARS = {r"\0": r"\x00", r"\<": "<", r"\>": ">"}
_OUTSIDE = _CHARS | {"{": r"\{", "[]": _NEVER, "[^]": "(?s:.)"}
_INSIDE = _CHARS | {r"\b": r"\x08"} | {char: "\\" + char for char in "[-&~"}
_LETTERS = frozenset("aDdfnrSstvWw")  # that mean something after a backslash, alone
_PAIR_CHARS = 12  # of two surrogates


def is_regular(pattern: str) -> bool:
    """Whether a pattern in Rust's syntax looks neither around nor back, and has nothing else that is more than regular,
    or not known."""
    return all(_is_sayable(part) for part in _PARTS.findall(pattern))


def in_rust(pattern: str) -> str:
    """The pattern in Rust's syntax, where characters have a meaning that are plain in ECMA-262."""
    return _PARTS.sub(lambda found: _part_in_rust(found[0]), pattern)


def _is_sayable(part: str) -> bool:
    return part[:2] != "(?" and part != _NEVER and all(map(_is_known, _ESCAPES.findall(part)))


def _is_known(escape: str) -> bool:
    char = escape[1]
    if len(escape) > 2:
        return char != "0"
    return char in _LETTERS or (char.isascii() and not char.isalnum())


def _part_in_rust(part: str) -> str:
    if part[0] != "[" or part in _OUTSIDE:
        return _said(part, _OUTSIDE)
    opening = "[^" if part[:2] == "[^" else "["
    return opening + _OF_CLASS.sub(_of_class, part[len(opening) :])


def _of_class(found: re.Match[str]) -> str:
    first, last = found.groups()
    if last is None and first in _TWICE and not found.string.startswith(first, found.end()):
        return first
    return "-".join(_said(end, _INSIDE) for end in (first, last) if end)


def _said(part: str, words: Mapping[str, str]) -> str:
    if len(part) == _PAIR_CHARS and part[:2] == r"\u":
        return json.loads(f'"{part}"')
    return words.get(part, part)
