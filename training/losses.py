"""What a draft network learns: the target's next tokens, some steps ahead, going on from its own outputs.

For row r and step s the network predicts token r + shift + 1 + s. Step 0 goes on from the target's state, each further
one from the output before it, as in service (EAGLE-3's training-time test). The loss of a step is the cross-entropy to
the target's distribution over the tokens that can be drafted, where the token that came is one of them; EAGLE-1 and -2
add a smooth L1 between the output and the target's state that it stands in for (Li et al., 2024). Each step counts
STEP_DECAY of the one before (Li et al., 2025). A draft model reads no states: its one step teaches all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import log_softmax, smooth_l1_loss

from engine.models.heads.base import Head
from training.attending import Branches, RootRows
from training.batches import Batch
from training.kinds import EAGLE, Kind
from training.network import DraftNetwork
from training.target_states import States

STEP_DECAY = 0.8


@dataclass(frozen=True, slots=True)
class Weights:
    """Of the parts of the loss."""

    token: float = 1.0
    feature: float = 0.5


class StepRows(NamedTuple):
    """One step's outputs for the rows that predict something, and what they should have been."""

    outputs: torch.Tensor
    """[n, hidden]"""
    rows: torch.Tensor
    """bool [B, R]: which rows those are."""
    predicted_pos: torch.Tensor
    """int64 [R]: position of the token that each row predicts."""


class Wanted(NamedTuple):
    """What a batch is to teach: the tokens that the target wrote, flat [n], and what it had in mind before each."""

    number: torch.Tensor
    """int64 [B, L]: number of the token at each position, where it is a wanted one."""
    tokens: torch.Tensor
    """int64 [n]"""
    states: torch.Tensor
    """[n, hidden]: the target's state before each."""
    probabilities: torch.Tensor
    """fp32 [n, drafted]: its distribution over the tokens that can be drafted."""
    can_be_drafted: torch.Tensor
    """bool [n]"""

    @classmethod
    @torch.no_grad()
    def of(cls, network: DraftNetwork, batch: Batch, states: States) -> Wanted:
        """Of a batch; no answer starts at position 0."""
        mask = batch.wanted
        number = mask.flatten().cumsum(0).view(mask.shape) - 1
        tokens, before = batch.tokens[mask], states.last.roll(1, dims=1)[mask]
        probabilities = (before.to(network.head.dtype) @ network.head.T).float().softmax(dim=-1)
        return cls(number, tokens, before, probabilities, torch.isin(tokens, network.drafted))


class Report(NamedTuple):
    """A batch's loss, to go back from, and figures as plain numbers, by step."""

    loss: torch.Tensor
    token_losses: list[float]
    accuracies: list[float]
    """Share of predicted tokens that are the ones that came."""
    feature_losses: list[float]


def unrolled(kind: Kind, head: Head, batch: Batch, states: States, num_steps: int) -> Iterator[StepRows]:
    """The steps of every row at once."""
    batch_size, length = batch.tokens.shape
    num_rows = length - kind.shift
    roots = torch.arange(num_rows, device=batch.tokens.device)
    below = RootRows(batch_size, kind.config.block.num_layers)
    branches: Branches | None = None
    fused = head.fuse(states.features[:, :num_rows].flatten(0, 1).to(head.dtype)) if kind.shift else None
    carried = fused
    for step in range(num_steps):
        # Past the end a row reads token 0; it predicts nothing there.
        places = (roots + kind.shift + step).clamp(max=length - 1)
        tokens = batch.tokens[:, places].flatten()
        positions = (roots + step).repeat(batch_size)
        if step == 0:
            attend = below.attend
        else:
            branches = branches or Branches(below, roots)
            attend = branches.attend
        outputs = head.forward(tokens, _or_empty(carried, tokens), positions, attend)
        predicted = roots + kind.shift + 1 + step
        there = predicted < batch.lengths[:, None]
        rows = there & batch.wanted[:, predicted.clamp(max=length - 1)]
        yield StepRows(outputs.unflatten(0, (batch_size, num_rows))[rows], rows, predicted)
        carried = head.carried(outputs)


def batch_loss(network: DraftNetwork, batch: Batch, states: States, *, num_steps: int, weights: Weights) -> Report:
    """The loss of a batch, and how it went."""
    kind, head = network.kind, network.built()
    wanted = Wanted.of(network, batch, states)
    total = states.last.new_zeros((), dtype=torch.float32)
    token_losses, accuracies, feature_losses = [], [], []
    for step, found in enumerate(unrolled(kind, head, batch, states, num_steps if kind.shift else 1)):
        if not len(found.outputs):
            break  # every answer of the batch is over
        index = wanted.number[:, found.predicted_pos.clamp(max=batch.tokens.shape[1] - 1)][found.rows]
        logits = head.logits(found.outputs)
        losses = -(wanted.probabilities[index] * log_softmax(logits, dim=-1)).sum(dim=-1)
        counted = wanted.can_be_drafted[index]
        token_loss = (losses * counted).sum() / counted.sum().clamp(min=1)
        loss = weights.token * token_loss
        if kind.algorithm == EAGLE:
            feature_loss = smooth_l1_loss(found.outputs.float(), wanted.states[index].float())
            loss = loss + weights.feature * feature_loss
            feature_losses.append(float(feature_loss.detach()))
        total = total + STEP_DECAY**step * loss
        token_losses.append(float(token_loss.detach()))
        accuracies.append(float((network.drafted[logits.argmax(dim=-1)] == wanted.tokens[index]).float().mean()))
    return Report(total, token_losses, accuracies, feature_losses)


def _or_empty(carried: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
    return tokens.new_empty((len(tokens), 0), dtype=torch.float32) if carried is None else carried
