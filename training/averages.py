"""A running mean of parameters: nearly as good at any time as they would be after the learning rate came down."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from training.network import DraftNetwork

# While little is seen, the mean is over the last of so many parts of it.
_FIRST_SHARE = 4


class Averages:
    """Means of a network's parameters over about `horizon` tokens, by the engine's names; `kept`: from a checkpoint."""

    def __init__(self, network: DraftNetwork, kept: Mapping[str, torch.Tensor], horizon: int) -> None:
        self.tensors = {
            name: kept[name].to(tensor.device) if kept else tensor.clone() for name, tensor in network.trained().items()
        }
        self._horizon = horizon

    @torch.no_grad()
    def take(self, network: DraftNetwork, seen: int, count: int) -> None:
        """After a step of `count` tokens, `seen` in all."""
        weight = min(1.0, count / min(self._horizon, max(1, seen // _FIRST_SHARE)))
        for name, tensor in network.trained().items():
            self.tensors[name].lerp_(tensor, weight)
