"""Which prompts are worth an answer: the model's own are now and then broken."""

from __future__ import annotations

import re
import unicodedata
from typing import Final

MIN_CHARS: Final = 12
MAX_CHARS: Final = 2000
_WORD = re.compile(r"[^\W_]+")


def is_sensible(text: str) -> bool:
    """Long enough, mostly printable ASCII and words, and not one phrase again and again."""
    text = text.strip()
    if not MIN_CHARS <= len(text) <= MAX_CHARS:
        return False
    odd = sum(not character.isascii() or not (character.isprintable() or character == "\n") for character in text)
    if odd > 0.02 * len(text):
        return False
    letters = sum(character.isalpha() for character in text)
    return letters > 0.5 * len(text) and not is_repetitive(text)


def is_repetitive(text: str) -> bool:
    """Whether few of its word triples are different ones, or a line stands there many times."""
    found = words(text)
    triples = list(zip(found, found[1:], found[2:], strict=False))
    if len(triples) >= 12 and len(set(triples)) < 0.75 * len(triples):
        return True
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return len(lines) >= 6 and len(set(lines)) < 0.6 * len(lines)


def words(text: str) -> list[str]:
    """Lower-case words and numbers, accents and punctuation gone: what counts when texts are compared."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return _WORD.findall(plain)


def normalized(text: str) -> str:
    """Equal for prompts that only differ in case, punctuation and spaces."""
    return " ".join(words(text))
