"""Keeps the prompts of benchmarks out of the data, by the overlap of word n-grams.

A prompt that shares any run of NGRAM words with an excluded one is refused; excluded prompts shorter than that are
refused when they occur as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from outrider.errors import StartupError
from training.data.jsonl import read_values, wrong
from training.data.quality import words

NGRAM: Final = 8
_KEYS = ("turns", "prompt", "question", "content", "messages", "conversations", "value", "text")


class OverlapFilter:
    """Knows the n-grams of the excluded prompts."""

    def __init__(self, excluded: Iterable[str]) -> None:
        self._grams: set[tuple[str, ...]] = set()
        self._lengths: set[int] = set()
        for text in excluded:
            found = words(text)
            if not found:
                continue
            size = min(NGRAM, len(found))
            self._lengths.add(size)
            self._grams.update(_grams(found, size))

    def overlaps(self, text: str) -> bool:
        """Whether `text` shares an n-gram with an excluded prompt. One shorter than n must be the whole of `text`."""
        found = words(text)
        for size in self._lengths:
            if size < NGRAM and len(found) != size:
                continue
            if any(gram in self._grams for gram in _grams(found, size)):
                return True
        return False


def read_prompts(path: Path) -> list[str]:
    """Every text of a JSONL file of prompts: MT-bench's `turns`, `prompt`, `question`, `messages` or plain strings.

    StartupError for a file without any, and for a line without: a prompt that is passed over would not be kept out.
    """
    prompts: list[str] = []
    try:
        for number, value in read_values(path):
            texts = [text for text in _texts(value) if text.strip()]
            if not texts:
                raise wrong(path, number, f"it holds no text; it must be a string, or have one of {', '.join(_KEYS)}")
            prompts += texts
    except RecursionError as error:
        raise StartupError(f"{path} holds brackets that are nested too deeply") from error
    if not prompts:
        raise StartupError(f"{path} holds no prompts")
    return prompts


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for key in _KEYS:
            yield from _texts(value.get(key))


def _grams(found: list[str], size: int) -> Iterator[tuple[str, ...]]:
    return (tuple(found[start : start + size]) for start in range(len(found) - size + 1))
