"""Prompts composed from templates, over every kind of thing that people ask of an assistant.

A template is a sentence with slots: `{topic}` takes a word of that list, `{n:3:9}` a number, `{passage}` and `{code}` a
text that the system's documentation brings. A prompt may get a wish about its form at the end.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Final

from training.data.material import Material

WEEKDAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

_SLOT = re.compile(r"\{(\w+?)(\d?)(?::(\d+):(\d+))?\}")
Passage = Callable[[random.Random], str]


class Composer:
    """Fills templates. `passage` and `code` give a text for a random state."""

    def __init__(self, material: Material, passage: Passage, code: Passage) -> None:
        self._material = material
        self._passages = {"passage": passage, "code": code}
        self._kinds = list(material.weights)

    def prompt(self, rng: random.Random) -> str:
        """Draws a prompt of some kind."""
        kind = rng.choices(self._kinds, weights=list(self._material.weights.values()))[0]
        text = self.fill(rng.choice(self._material.templates[kind]), rng)
        if "\n" not in text and rng.random() < 0.2:
            text += " " + self.fill(rng.choice(self._material.wishes), rng)
        return text

    def about(self, kind: str, passage: str, rng: random.Random) -> str:
        """A task of that kind on `passage`."""
        template = rng.choice([template for template in self._material.templates[kind] if "{passage}" in template])
        before, _, after = template.partition("{passage}")
        return self.fill(before, rng) + passage + self.fill(after, rng)

    def follow_up(self, rng: random.Random) -> str:
        """Draws what a user may say after an answer."""
        return self.fill(rng.choice(self._material.follow_ups), rng)

    def opener(self, rng: random.Random) -> str:
        """Draws how a prompt begins; may be empty."""
        return self.fill(rng.choice(self._material.openers), rng)

    def self_written(self, rng: random.Random) -> str:
        """A prompt for a text that is asked about afterwards."""
        return self.fill(rng.choice(self._material.self_written), rng)

    def system(self, rng: random.Random) -> str:
        """Draws a system prompt."""
        return self.fill(rng.choice(self._material.systems), rng)

    def fill(self, template: str, rng: random.Random) -> str:
        """`template` with its slots filled; `{topic}` and `{topic2}` differ."""
        used: set[str] = set()

        def one(match: re.Match[str]) -> str:
            kind, _, low, high = match.groups()
            if low is not None:
                return str(rng.randint(int(low), int(high)))
            if kind in "abcd":
                return str(rng.randint(2, 99))
            if kind == "weekday":
                return rng.choice(WEEKDAYS)
            if kind in self._passages:
                return self._passages[kind](rng)
            every = self._material.words[kind]
            word = rng.choice([word for word in every if word not in used] or every)
            used.add(word)
            return word

        text = _SLOT.sub(one, template)
        return re.sub(r"\ba (?=[aeiou]\w)(?!unique|use|one)", "an ", text) if "\n\n" not in text else text
