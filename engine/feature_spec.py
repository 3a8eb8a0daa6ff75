"""Which hidden states of the target are kept for drafters. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import ModelConfig
from outrider.errors import StartupError


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """Which hidden states of the target are kept beside the KV, for heads that draft from them.

    kind `none`; `last`: the state that feeds the output head, after the final norm; `aux`: the states ENTERING the
    layers named, ascending, concatenated (EAGLE-3; index num_layers is the last layer's output).
    """

    kind: str = "none"
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in {"none", "last", "aux"} or (self.kind == "aux") != bool(self.layers):
            raise StartupError(f"--features is {self}; it must be none, last or aux:I,J,K")
        if list(self.layers) != sorted(set(self.layers)) or (self.layers and self.layers[0] < 0):
            raise StartupError(f"--features is {self}; its layers must ascend from 0 or more")

    @classmethod
    def parse(cls, text: str) -> FeatureSpec:
        """Reads the flag's form: `none`, `last`, `aux:2,15,27`."""
        kind, _, layers = text.partition(":")
        try:
            return cls(kind, tuple(int(item) for item in layers.split(",")) if layers else ())
        except ValueError:
            raise StartupError(f"--features is {text!r}, which names a layer that is no number") from None

    def width(self, config: ModelConfig) -> int:
        """Numbers kept per position. Raises StartupError for a layer that the model does not have."""
        if self.layers and self.layers[-1] > config.num_layers:
            raise StartupError(
                f"--features is {self}; of a model with {config.num_layers} layers they are 0 to {config.num_layers}, "
                "the last one's output"
            )
        return {"none": 0, "last": 1, "aux": len(self.layers)}[self.kind] * config.hidden_size

    def __str__(self) -> str:
        return self.kind + (":" + ",".join(map(str, self.layers)) if self.layers else "")
