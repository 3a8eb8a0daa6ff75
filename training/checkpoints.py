"""Where a training stands, on disk: everything to go on as if it had never stopped, or to export the head."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from outrider.errors import StartupError, reason_of
from training.batches import Plan
from training.outputs import save, write_file

LAST: Final = "checkpoint.pt"
BEST: Final = "best.pt"
EXPORT_FOLDER: Final = "export"
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
    losses: list[float] = field(default_factory=list)
    """Of the last steps, for the mean that is noted."""

    @property
    def measured(self) -> dict[str, torch.Tensor]:
        """The tensors that accept length is of, and that are exported."""
        return self.averaged or self.tensors

    def save(self, path: Path) -> None:
        """Writes a checkpoint, whole or not at all."""
        values = {"format": FORMAT, "plan": asdict(self.plan)}
        values |= {name: getattr(self, name) for name in self.__slots__ if name != "plan"}
        write_file(path, "the checkpoint", lambda partial: save(values, partial))

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """StartupError when it cannot be read. Tensors come to the CPU."""
        try:
            values: Any = torch.load(path, map_location="cpu", weights_only=True)
        except OSError as error:
            raise StartupError(f"checkpoint {path} cannot be read: {reason_of(error)}") from error
        except Exception as error:  # of damaged bytes the unpickler makes what they say, and fails in every way
            raise StartupError(
                f"{path} is no checkpoint, or is damaged ({type(error).__name__}); {_remedy(path)}"
            ) from error
        if not isinstance(values, dict) or "format" not in values:
            raise StartupError(f"{path} is no checkpoint of `train head`; {_remedy(path)}")
        if values.pop("format") != FORMAT:
            raise StartupError(f"{path} is a checkpoint of another version")
        try:
            values["plan"] = Plan(**values["plan"])
            return cls(**values).checked()
        except (KeyError, TypeError) as error:
            raise StartupError(f"{path} is a checkpoint with parts missing or wrong; {_remedy(path)}") from error

    def checked(self) -> Checkpoint:
        """Itself. TypeError where a part is not of its kind."""
        for part in (self.tensors, self.averaged):
            if not isinstance(part, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in part.values()):
                raise TypeError("tensors are wanted")
        if not isinstance(self.facts, dict) or not isinstance(self.drafted, torch.Tensor):
            raise TypeError("facts and the draft vocabulary are wanted")
        return self

    def check(self, facts: dict[str, Any], path: Path) -> None:
        """StartupError unless it was made with these facts; one that it does not know counts as off."""
        for name, value in facts.items():
            if (self.facts.get(name) or None) != (value or None):
                raise StartupError(
                    f"{path} was trained with {name} {self.facts.get(name)!r}, now {value!r}; name another --output"
                )

    def check_beginning(self, initial_head: str | None, path: Path) -> None:
        """StartupError where --initial-head is given and names another than it began with, where it knows that."""
        begun = self.facts.get("initial_head", initial_head)
        if initial_head not in (None, begun):
            raise StartupError(
                f"{path} began {f'with --initial-head {begun}' if begun else 'without --initial-head'}, now it is "
                f"{initial_head}; leave it out to go on, or name another --output"
            )


def _remedy(path: Path) -> str:
    best = path.with_name(BEST)
    return "remove it to begin anew" + (f", or put {best} in its place" if path != best and best.is_file() else "")
