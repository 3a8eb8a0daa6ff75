"""Whether patterns of names can meet in one, by the characters that what matches them begins with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

_MOST_PATTERNS = 32  # all pairs are looked at
_MOST_CHARS = 16
_ITEM = re.compile(
    r"(\\[dDwWsS\W]|\[\^?(?:[^\]\\]|\\.)+\]|[^\\\[\](){}*+?^$|])"
    r"(?:([?*+])|\{([0-9]{1,2})(,[0-9]*)?\})?(?![?*+{])",
    re.DOTALL,
)
_OF_CLASS = re.compile(r"(\\.|[^\\])(?:-(\\.|[^\\]))?", re.DOTALL)

# Sets of characters are bits: one for each in ASCII, and above these each stands for many.
_ASCII = 128
_OTHERS = ((1 << _ASCII) - 1) << _ASCII
_ANY = (1 << 2 * _ASCII) - 1


@dataclass(frozen=True, slots=True)
class _Start:
    """What is sure of a pattern: its text's first characters, and whether there are no more."""

    chars: list[int]
    is_all: bool = False


def never_meet(patterns: Sequence[str]) -> bool:
    """Whether it is plain that no text matches two of these patterns in Rust's syntax; False where there are many."""
    if len(patterns) > _MOST_PATTERNS:
        return False
    return all(_differ(one, other) for one, other in combinations(map(_start, patterns), 2))


def _differ(one: _Start, other: _Start) -> bool:
    if any(not mine & theirs for mine, theirs in zip(one.chars, other.chars, strict=False)):
        return True
    longer = len(one.chars) - len(other.chars)
    return (longer < 0 and one.is_all) or (longer > 0 and other.is_all)


def _start(pattern: str) -> _Start:
    chars: list[int] = []
    if not pattern.startswith("^") or "|" in pattern:
        return _Start(chars)
    at = 1
    while len(chars) < _MOST_CHARS and (item := _ITEM.match(pattern, at)):
        char, times, count, or_more = item.groups()
        if times and times in "?*":
            return _Start(chars)
        chars += [_bits(char)] * int(count or 1)
        if times or or_more:
            return _Start(chars)
        at = item.end()
    return _Start(chars, is_all=pattern[at:] == "$")


def _bits(item: str) -> int:
    if item == ".":
        return _ANY
    if item[0] != "[":
        return _one(item)
    negated = item.startswith("[^")
    bits = 0
    for first, last in _OF_CLASS.findall(item[1 + negated : -1]):
        if not last:
            bits |= _one(first)
        elif "\\" in first + last:
            return _ANY
        else:
            bits |= _range(first, last)
    return _others_than(bits) if negated and bits != _ANY else bits


def _one(item: str) -> int:
    if item[0] == "\\" and item[1].isalnum():
        return _SETS.get(item, _ANY)
    code = ord(item[-1])
    return 1 << (code if code < _ASCII else _ASCII + code % _ASCII)


def _range(first: str, last: str) -> int:
    start, stop = ord(first), min(ord(last) + 1, _ASCII)
    inside = (1 << stop) - (1 << start) if start < stop else 0
    return inside | (_OTHERS if ord(last) >= _ASCII else 0)


def _others_than(bits: int) -> int:
    return _ANY & ~bits | _OTHERS


_DIGITS = _range("0", "9") | _OTHERS
_WORD = _DIGITS | _range("A", "Z") | _range("a", "z") | _one("_")
_SPACE = sum(map(_one, "\t\n\v\f\r ")) | _OTHERS
_SETS = {
    r"\d": _DIGITS, r"\w": _WORD, r"\s": _SPACE,
    r"\D": _others_than(_DIGITS), r"\W": _others_than(_WORD), r"\S": _others_than(_SPACE),
}  # fmt: skip
