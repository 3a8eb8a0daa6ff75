"""How parameters move: Muon on the matrices of layers, AdamW on everything else, one warm-up and cosine for both."""

from __future__ import annotations

import math
from typing import Any

from torch.optim import AdamW, Optimizer

from engine.models.heads.names import OUTPUT_HEAD
from training.muon import Muon
from training.network import DraftNetwork

FINAL_SHARE = 0.05
# An output head starts as the target's own, nearly right; AdamW would move rare tokens' rows as fast as frequent ones.
OUTPUT_HEAD_SHARE = 0.1


class Optimizers:
    """Both, stepped and saved as one."""

    def __init__(self, network: DraftNetwork, *, learning_rate: float, weight_decay: float, use_muon: bool) -> None:
        matrices, others, heads = [], [], []
        for name, parameter in network.tensors.items():
            if not parameter.requires_grad:
                continue
            if name == OUTPUT_HEAD.replace(".", "/"):
                heads.append(parameter)
            else:
                matrices.append((name, parameter)) if use_muon and parameter.ndim == 2 else others.append(parameter)
        self._every: list[Optimizer] = []
        if matrices:
            head_dim = network.kind.config.block.head_dim
            self._every.append(Muon(matrices, lr=learning_rate, weight_decay=weight_decay, head_dim=head_dim))
        groups = [{"params": others, "share": 1.0}, {"params": heads, "share": OUTPUT_HEAD_SHARE}]
        self._every.append(
            AdamW([g for g in groups if g["params"]], lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        )
        self._learning_rate = learning_rate

    def step(self, share: float) -> None:
        """One step at `share` of the learning rate, and gradients back to none."""
        for optimizer in self._every:
            for group in optimizer.param_groups:
                group["lr"] = self._learning_rate * share * group.get("share", 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """The optimizers' states, for a checkpoint."""
        return [optimizer.state_dict() for optimizer in self._every]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Takes the states of a checkpoint of the same network."""
        for optimizer, state in zip(self._every, states, strict=True):
            optimizer.load_state_dict(state)


def schedule(seen: int, total: int, warmup: int) -> float:
    """Share of the learning rate after `seen` of `total` tokens: up in a line, then down a cosine to FINAL_SHARE."""
    if seen < warmup:
        return (seen + 1) / (warmup + 1)
    progress = min(1.0, (seen - warmup) / max(1, total - warmup))
    return FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))
