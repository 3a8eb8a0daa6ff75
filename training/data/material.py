"""What prompts are made of, read from prompts.toml: templates of every kind, how prompts begin, nouns to fill in."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True)
class Material:
    """Everything with `{slots}`, which Composer fills."""

    openers: tuple[str, ...]
    """How prompts begin that the model finishes by itself. A small model left alone at a high temperature asks half
    nonsense; given how people start, at a lower one, it asks what people ask."""
    follow_ups: tuple[str, ...]
    wishes: tuple[str, ...]
    systems: tuple[str, ...]
    self_written: tuple[str, ...]
    weights: dict[str, int]
    """How often each kind of template is taken."""
    templates: dict[str, tuple[str, ...]]
    words: dict[str, tuple[str, ...]]

    @classmethod
    def load(cls) -> Material:
        """Reads the package's prompts.toml."""
        raw: dict[str, Any] = tomllib.loads((files("training.data") / "prompts.toml").read_text(encoding="utf-8"))
        return cls(
            **{name: _lines(raw[name]) for name in ("openers", "follow_ups", "wishes", "systems", "self_written")},
            weights=raw["weights"],
            templates={kind: _lines(text) for kind, text in raw["templates"].items()},
            words={kind: tuple(" ".join(text.split()).split("; ")) for kind, text in raw["words"].items()},
        )


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.replace("\\n", "\n") for line in text.removesuffix("\n").split("\n"))
