"""What a tokenizer's decoder does with one piece, read from its description in tokenizer.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# ---- Byte-level BPE


def is_byte_level(decoder: dict[str, Any] | None) -> bool:
    """Whether the decoder writes pieces as bytes in GPT-2's alphabet, and does nothing else."""
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        kinds = [step["type"] for step in decoder["decoders"]]
        return kinds in (["ByteLevel"], ["ByteLevel", "Fuse"], ["Fuse", "ByteLevel"])
    return decoder["type"] == "ByteLevel"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's bytes as characters: printable Latin-1 stands for itself, the rest for U+0100 and up in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTES = _byte_alphabet()


def byte_piece(text: str) -> bytes:
    """The bytes of a piece; one that is not in the alphabet (an added token with a space in it) stands for itself."""
    try:
        return bytes(_BYTES[char] for char in text)
    except KeyError:
        return text.encode()


# ---- Sentencepiece style


@dataclass(frozen=True, slots=True)
class FallbackRule:
    """What the decoder does: replacements within a piece, `<0xNN>` pieces, leading spaces of the whole."""

    replacements: tuple[tuple[str, str], ...]
    strip: int

    def piece(self, text: str) -> str | int:
        """A piece as its text, or as its byte."""
        for old, new in self.replacements:
            text = text.replace(old, new)
        if len(text) == 6 and text.isascii() and text.startswith("<0x") and text.endswith(">"):
            try:
                return int(text[3:5], 16)
            except ValueError:
                return text
        return text


def fallback_rule(decoder: dict[str, Any] | None) -> FallbackRule | None:
    """The rule of a decoder made of Replace*, ByteFallback, Fuse, Strip (the start only); None for another."""
    if decoder is None or decoder["type"] != "Sequence":
        return None
    steps = list(decoder["decoders"])
    replacements: list[tuple[str, str]] = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        step = steps.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    kinds = [step["type"] for step in steps]
    if kinds not in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"]):
        return None
    if kinds[-1] != "Strip":
        return FallbackRule(tuple(replacements), 0)
    strip = steps[-1]
    only_leading_spaces = strip["stop"] == 0 and strip["content"] == " "
    return FallbackRule(tuple(replacements), strip["start"]) if only_leading_spaces else None
