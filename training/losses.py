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
from torch.nn.functional import smooth_l1_loss

from engine.models.heads.base import Head
from training.attending import Branches, RootRows
from training.batches import Batch
from training.cross_entropy import CHUNK_ROWS, SoftCrossEntropy
from training.kinds import EAGLE, Kind
from training.network import DraftNetwork
from training.target_states import States

STEP_DECAY = 0.8


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the parts of the loss."""

    token: float
    feature: float


class StepRows(NamedTuple):
    """One step's outputs for the rows that predict something, and what they should have been."""

    outputs: torch.Tensor
    """[n, hidden]"""
    rows: torch.Tensor
    """bool [B, R]: which rows those are."""
    predicted_pos: torch.Tensor
    """int64 [R]: position of the token that each row predicts."""


class Wanted(NamedTuple):
    """The lesson of a batch: the tokens that the target wrote, flat [n], and what it had in mind before each."""

    number: torch.Tensor
    """int64 [B, L]: number of the token at each position, where it is a wanted one."""
    tokens: torch.Tensor
    """int64 [n]"""
    states: torch.Tensor
    """[n, hidden]: the target's state before each."""
    probabilities: torch.Tensor
    """[n, drafted]: its distribution over the tokens that can be drafted, as the network computes."""
    can_be_drafted: torch.Tensor
    """bool [n]"""

    @classmethod
    @torch.no_grad()
    def of(cls, network: DraftNetwork, batch: Batch, states: States) -> Wanted:
        """Takes it from a batch; no answer starts at position 0."""
        mask = batch.wanted
        number = mask.flatten().cumsum(0).view(mask.shape) - 1
        tokens, before = batch.tokens[mask], states.last.roll(1, dims=1)[mask]
        read = before.to(network.head.dtype)
        probabilities = read.new_empty((len(read), len(network.head)))
        for start in range(0, len(read), CHUNK_ROWS):
            logits = read[start : start + CHUNK_ROWS] @ network.head.T
            probabilities[start : start + CHUNK_ROWS] = logits.softmax(dim=-1, dtype=torch.float32)
        return cls(number, tokens, before, probabilities, torch.isin(tokens, network.drafted))


class Report(NamedTuple):
    """A batch's loss, to go back from, and figures as plain numbers, by step."""

    loss: torch.Tensor
    token_losses: list[float]
    accuracies: list[float]
    """Share of predicted tokens that are the ones that came."""
    feature_losses: list[float]


def unrolled(
    kind: Kind, head: Head, batch: Batch, states: States, num_steps: int, going_on: torch.Tensor | None = None
) -> Iterator[StepRows]:  # fmt: skip
    """The steps of every row at once; going_on: rows that take more than the first, int64 [R], default all."""
    batch_size, length = batch.tokens.shape
    num_rows = length - kind.shift
    roots = torch.arange(num_rows, device=batch.tokens.device)
    below = RootRows(batch_size, kind.config.block.num_layers, kind.config.block.windows)
    branches: Branches | None = None
    fused = head.fuse(states.features[:, :num_rows].flatten(0, 1).to(head.dtype)) if kind.shift else None
    carried = fused
    for step in range(num_steps):
        if step == 1:
            if going_on is not None and carried is not None:
                carried = carried.unflatten(0, (batch_size, num_rows))[:, going_on].flatten(0, 1)
                roots = going_on
            branches = Branches(below, roots)
        # Past the end a row reads token 0; it predicts nothing there.
        places = (roots + kind.shift + step).clamp(max=length - 1)
        tokens = batch.tokens[:, places].flatten()
        positions = (roots + step).repeat(batch_size)
        attend = below.attend if branches is None else branches.attend
        outputs = head.forward(tokens, _or_empty(carried, tokens), positions, attend)
        predicted = roots + kind.shift + 1 + step
        there = predicted < batch.lengths[:, None]
        rows = there & batch.wanted[:, predicted.clamp(max=length - 1)]
        yield StepRows(outputs.unflatten(0, (batch_size, len(roots)))[rows], rows, predicted)
        carried = head.carried(outputs)


def batch_loss(
    network: DraftNetwork, batch: Batch, states: States, *, num_steps: int, weights: Weights, unroll_every: int
) -> Report:  # fmt: skip
    """The loss of a batch, and how it went. unroll_every: one row of so many takes more than the first step."""
    kind, (head, output_head) = network.kind, network.built_for_loss()
    going_on = _going_on(batch, kind.shift, unroll_every)
    num_steps = num_steps if kind.shift and len(going_on) else 1
    wanted = Wanted.of(network, batch, states)
    total = states.last.new_zeros((), dtype=torch.float32)
    token_losses, accuracies, feature_losses = [], [], []
    for step, found in enumerate(unrolled(kind, head, batch, states, num_steps, going_on)):
        if not len(found.outputs):
            break  # every answer of the batch is over
        index = wanted.number[:, found.predicted_pos.clamp(max=batch.tokens.shape[1] - 1)][found.rows]
        counted = wanted.can_be_drafted[index].float()
        token_loss, likeliest = SoftCrossEntropy.apply(
            head.logits(found.outputs).to(output_head.dtype), output_head, wanted.probabilities[index],
            counted / counted.sum().clamp(min=1),
        )  # fmt: skip
        loss = weights.token * token_loss
        if kind.algorithm == EAGLE:
            feature_loss = smooth_l1_loss(found.outputs.float(), wanted.states[index].float())
            loss = loss + weights.feature * feature_loss
            feature_losses.append(float(feature_loss.detach()))
        total = total + STEP_DECAY**step * loss
        token_losses.append(float(token_loss.detach()))
        accuracies.append(float((network.drafted[likeliest] == wanted.tokens[index]).float().mean()))
    return Report(total, token_losses, accuracies, feature_losses)


def _going_on(batch: Batch, shift: int, every: int) -> torch.Tensor:
    """Rows that go on from their own outputs: of those before an answer's tokens one of `every`, by turns."""
    second = batch.wanted[:, shift + 2 :].any(dim=0).nonzero()[:, 0]
    return second[int(batch.tokens.sum()) % every :: every] if len(second) > every else second


def _or_empty(carried: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
    return tokens.new_empty((len(tokens), 0), dtype=torch.float32) if carried is None else carried
