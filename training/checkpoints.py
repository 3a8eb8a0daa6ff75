"""Where a training stands, on disk: everything to go on as if it had never stopped, or to export the head."""

from __future__ import annotations

import os
import pickle
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from outrider.errors import StartupError
from training.batches import Plan

LAST: Final = "checkpoint.pt"
BEST: Final = "best.pt"
FORMAT: Final = 1


@dataclass(slots=True)
class Checkpoint:
    """facts: what must be the same to go on; drafted: the draft vocabulary, int64 [n]; history:
    a row for each evaluation."""

    facts: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    drafted: torch.Tensor
    plan: Plan = field(default_factory=Plan)
    seen: int = 0
    step: int = 0
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    averaged: dict[str, torch.Tensor] = field(default_factory=dict)
    """Running means of `tensors`, where they are kept."""
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def measured(self) -> dict[str, torch.Tensor]:
        """The tensors that accept length is of, and that are exported."""
        return self.averaged or self.tensors

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        partial = path.with_suffix(".partial")
        values = {"format": FORMAT, "plan": asdict(self.plan)}
        values |= {name: getattr(self, name) for name in self.__slots__ if name != "plan"}
        torch.save(values, partial)
        os.replace(partial, path)

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """StartupError when it cannot be read. Tensors come to the CPU."""
        try:
            values = torch.load(path, map_location="cpu", weights_only=True)
            if values.pop("format") != FORMAT:
                raise StartupError(f"{path} is a checkpoint of another version")
            return cls(**(values | {"plan": Plan(**values["plan"])}))
        except (OSError, RuntimeError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
            raise StartupError(f"checkpoint {path} cannot be read: {error}") from error

    def check(self, facts: dict[str, Any], path: Path) -> None:
        """StartupError unless it was made with these facts; one that it does not know counts as off."""
        for name, value in facts.items():
            if (self.facts.get(name) or None) != (value or None):
                raise StartupError(
                    f"{path} was trained with {name} {self.facts.get(name)!r}, now {value!r}; name another --output"
                )
