"""What an assistant's message is made of, as its text comes in: content, reasoning, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins; `index` counts the message's calls from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


Part = Content | Reasoning | CallBegin | CallArguments


class PartParser(Protocol):
    """Finds the parts in one choice's text."""

    def push(self, text: str) -> Iterable[Part]:
        """What can be said for certain now that `text` has come."""
        ...

    def finish(self) -> Iterable[Part]:
        """What was held back, when no text follows."""
        ...


def taken(pieces: list[str]) -> str:
    """The pieces as one text; the list is empty afterwards. What is held piece by piece is copied once."""
    text = "".join(pieces)
    pieces.clear()
    return text


def split_at(text: str, marker: str) -> tuple[str, bool, str]:
    """`text` before `marker`, whether it is there, and what follows; where it is not, the tail that may begin it."""
    before, found, after = text.partition(marker)
    if found:
        return before, True, after
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-size:]):
            return text[:-size], False, text[-size:]
    return text, False, ""


def begins_mark(text: str, marks: Iterable[str]) -> bool:
    """Whether `text`, white space around it left out, is one of the marks, the beginning of one, or empty."""
    return any(mark.startswith(text.strip()) for mark in marks)
