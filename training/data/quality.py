"""Which prompts are worth an answer: the model's own are now and then broken."""

from __future__ import annotations

import re
import unicodedata
from typing import Final

MIN_CHARS: Final = 12
MAX_CHARS: Final = 2000
_WORD = re.compile(r"[^\W_]+")
_ACCENT = re.compile("[\u0300-\u036f]")
_OWN_WORD = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff]")  # of scripts without spaces
_TYPOGRAPHIC = re.compile("[\u00a1-\u00bf\u2010-\u205e]")  # quotes and dashes, which end no word


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
    """Lower-case words and numbers, accents and punctuation gone: what counts when texts are compared.

    A word of Chinese or Japanese is one character.
    """
    plain = unicodedata.normalize("NFKD", text).lower()
    if plain.isascii():
        return _WORD.findall(plain)
    plain = unicodedata.normalize("NFC", _ACCENT.sub("", plain))
    return "".join(map(_parted, plain)).split()


def _parted(character: str) -> str:
    """What a character of words gives to them: itself, their end, or nothing."""
    kind = unicodedata.category(character)[0]
    if character.isalnum() or kind == "M":  # marks are vowels in many scripts
        return f" {character} " if _OWN_WORD.match(character) else character
    ends = kind == "P" and not _TYPOGRAPHIC.match(character)  # some scripts have no spaces but these
    return " " if ends or character.isascii() or character.isspace() else ""


def normalized(text: str) -> str:
    """Equal for prompts that only differ in case, punctuation and spaces; those without any word stay as they are."""
    return " ".join(words(text)) or text.strip()
