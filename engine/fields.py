"""A config.json's values, checked as they are taken."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from outrider.errors import StartupError

# Far above any published model; a number beyond them is damage or an attack on memory.
LIMITS = {
    "vocab_size": 2**22,
    "hidden_size": 2**17,
    "intermediate_size": 2**19,
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**11,
    "num_key_value_heads": 2**11,
    "head_dim": 2**10,
    "max_position_embeddings": 2**27,
}


class NotOursError(StartupError):
    """A model of one of our families with something that our decoders do not have."""


@dataclass(frozen=True, slots=True)
class Fields:
    """A config.json, or an object in it, as it stands, and where. Null is as if it were left out."""

    path: Path
    values: dict[str, Any]

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.values.get(key)
        value = default if value is None else value
        limit = LIMITS.get(key, 2**27)
        if type(value) is not int or not 1 <= value <= limit:
            self.fail(f"{key} is {value!r}; it must be a whole number from 1 to {limit}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
            self.fail(f"{key} is {value!r}; it must be a finite number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A field that is true or false."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            self.fail(f"{key} is {value!r}; it must be true or false")
        return value

    def fail(self, message: str) -> NoReturn:
        """StartupError naming the file."""
        raise StartupError(f"{self.path}: {message}")

    def leave(self, message: str) -> NoReturn:
        """NotOursError naming the file."""
        raise NotOursError(f"{self.path}: {message}")
