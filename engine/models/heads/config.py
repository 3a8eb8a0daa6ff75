"""Reading a head's config.json: the checks that all families share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from engine.config import ModelConfig, read_config
from engine.fields import LIMITS, Fields
from engine.models.heads.target import TargetShape
from outrider.errors import StartupError

_NOT_OF_THE_CLASS = ("num_key_value_heads", "head_dim", "sliding_window")
_Q_NORM = "self_attn.q_norm.weight"


@dataclass(frozen=True, slots=True)
class RawConfig(Fields):
    """A head's config.json."""

    def refuse(self, *keys: str) -> None:
        """StartupError when one of these is set to anything but false, 0 or null."""
        for key in keys:
            if self.values.get(key):
                self.fail(f"{key} is {self.values[key]!r}, which is not supported in a head")

    def block(self, like: str, *, num_layers: int) -> ModelConfig:
        """The head's decoder layers, read as those of a model of architecture `like`.

        A head serves sessions as long as its target's, whatever max_position_embeddings says (SGLang overrides it
        too); only a sliding window bounds max_position.
        """
        # It is seldom of that architecture's class, so what it leaves out is not what that one takes for it.
        values = {**dict.fromkeys(_NOT_OF_THE_CLASS), **self.values, "architectures": [like]}
        config = read_config(self.path, values, {})
        shortest = min((window for window in config.windows if window), default=LIMITS["max_position_embeddings"])
        return replace(config, num_layers=num_layers, max_position=shortest, windows=())

    def layer_like(self, stored: Collection[str]) -> str:
        """The supported architecture whose layers its own are like, by the names of its tensors and of itself.

        Heads bear their target's name whether or not they have its norms of q and k; with nothing stored it is
        believed.
        """
        names = self.values.get("architectures")
        name = f"{names[0] if isinstance(names, list) and names else ''} {self.values.get('model_type', '')}".lower()
        if any(_Q_NORM in tensor for tensor in stored) or (not stored and "qwen3" in name):
            return "Qwen3ForCausalLM"
        return "Qwen2ForCausalLM" if "qwen2" in name else "LlamaForCausalLM"


def check_fits(path: Path, target: TargetShape, *, hidden_size: int, vocab_size: int) -> None:
    """StartupError, naming both sides, unless the head was made for a target of these sizes."""
    for key, own, theirs in (
        ("hidden_size", hidden_size, target.hidden_size),
        ("vocab_size", vocab_size, target.vocab_size),
    ):
        if own != theirs:
            raise StartupError(
                f"the draft head {path.parent} is for a target of {key} {own}; that of {target.folder} is {theirs}"
            )
