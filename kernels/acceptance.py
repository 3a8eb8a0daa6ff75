"""Which draft nodes the target keeps, and the token it adds.

A tree comes as on the wire: `tokens` and `parents`, parents[i] < i, -1 the root, no two siblings with one token. Rows
hold the root first: row 0 is the root, row i + 1 is node i. The result is the path of accepted nodes, root to leaf,
and the bonus, the target's own token after it; a bonus of -1 says that the last row had no distribution.

Two rules:

- Coupled: each row has the token that the target draws there, whatever was drafted; the child that equals it is
  accepted, and where none does it is the bonus. The output is the one of plain decoding with the same random numbers.
  Greedy decoding is this rule with the largest logit as the target's token.
- Thresholds: SGLang's tree_speculative_sampling_target_only, for requests that lower `threshold_single` or
  `threshold_acc` to trade exactness for length. Greedy requests do not use it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels.sampling import NO_TOKEN, sample

_LEAST_THRESHOLD = 1e-9  # SGLang's, where the flag is 0


class Accepted(NamedTuple):
    """One session's outcome."""

    nodes: list[int]
    """Accepted nodes from the root downwards: indices in the tree as given."""
    bonus: int
    """The target's token after the last of them; -1 when its row had no distribution."""


class AcceptedBatch(NamedTuple):
    """B sessions' outcomes in fixed shapes."""

    nodes: torch.Tensor
    """int64 [B, n]: accepted nodes from the root downwards, then -1."""
    num_accepted: torch.Tensor
    """int64 [B]."""
    bonus: torch.Tensor
    """int64 [B]."""


def settled(outcome: Accepted, tokens: Sequence[int]) -> Accepted | None:
    """The outcome without a bonus that its row did not have: the last accepted token is the target's own as well.

    None where there is no token at all.
    """
    if outcome.bonus != NO_TOKEN:
        return outcome
    return Accepted(outcome.nodes[:-1], tokens[outcome.nodes[-1]]) if outcome.nodes else None


def walk(children: Mapping[int, Mapping[int, int]], draw: Callable[[int], int]) -> Accepted:
    """The coupled rule; `draw(row)` gives the target's token (-1: none) and is called for visited rows only, once each.

    children: of each node that has some (-1: the root), they by token.
    """
    nodes: list[int] = []
    wanted, offered = draw(0), children.get(-1)
    while offered is not None and (node := offered.get(wanted)) is not None:
        nodes.append(node)
        wanted, offered = draw(node + 1), children.get(node)
    return Accepted(nodes, wanted)


def accept_coupled_batch(
    parents: torch.Tensor, tokens: torch.Tensor, num_nodes: torch.Tensor, target_tokens: torch.Tensor
) -> AcceptedBatch:
    """The coupled rule for B trees of at most n nodes, without a look at the values on the host.

    parents, tokens: integer [B, n], of which the first num_nodes [B] count; target_tokens: integer [B, n + 1].
    """
    batch, num_slots = tokens.shape
    rows = torch.arange(num_slots + 1, device=tokens.device)
    padded = rows[1:] > num_nodes[:, None]
    above = torch.where(padded, 0, parents.long() + 1)
    agrees = (tokens == target_tokens.gather(1, above)) & ~padded
    # Row r is accepted when it and all rows above it agree: pointers to ancestors double until they reach the root.
    accepted = torch.nn.functional.pad(agrees, (1, 0), value=True)
    ancestor = torch.nn.functional.pad(above, (1, 0))
    for _ in range(num_slots.bit_length()):
        accepted = accepted & accepted.gather(1, ancestor)
        ancestor = ancestor.gather(1, ancestor)
    last = (rows * accepted).amax(dim=1)
    # A path ascends, so the accepted nodes in order are the accepted rows in order; the others go to a spare column.
    kept = accepted[:, 1:]
    place = torch.where(kept, kept.long().cumsum(dim=1) - 1, num_slots)
    nodes = torch.full((batch, num_slots + 1), -1, dtype=torch.int64, device=tokens.device)
    nodes.scatter_(1, place, torch.where(kept, rows[1:] - 1, -1))
    bonus = target_tokens.gather(1, last[:, None])[:, 0].long()
    return AcceptedBatch(nodes[:, :num_slots], kept.sum(dim=1), bonus)


def accept_thresholds_batch(
    parents: torch.Tensor, tokens: torch.Tensor, num_nodes: torch.Tensor, probs: torch.Tensor, coins: torch.Tensor,
    finals: torch.Tensor, threshold_single: torch.Tensor, threshold_acc: torch.Tensor,
) -> AcceptedBatch:  # fmt: skip
    """`accept_thresholds` for B trees of at most n nodes, without a look at the values on the host.

    parents, tokens: integer [B, n], of which the first num_nodes [B] count; probs float64 [B, n + 1, V]: filtered
    distributions by row, all zeros where there is none; coins, finals float64 [B, n + 1] by depth; thresholds
    float64 [B], each session's own.
    """
    batch, width = tokens.shape
    scale = threshold_acc.clamp(min=_LEAST_THRESHOLD)
    last = torch.full((batch,), -1, dtype=torch.int64, device=tokens.device)
    count, reached = torch.zeros_like(last), torch.zeros_like(scale)
    nodes = torch.full((batch, width), -1, dtype=torch.int64, device=tokens.device)
    rejected = torch.zeros((batch, width), dtype=torch.bool, device=tokens.device)
    each = torch.arange(batch, device=tokens.device)
    for node in range(width):
        is_child = (parents[:, node] == last) & (node < num_nodes)
        own = probs[each, last + 1, torch.where(is_child, tokens[:, node], 0)] * is_child
        reached = reached + own
        taken = (own > 0.0) & ((coins[each, count] <= reached / scale) | (own >= threshold_single))
        # A place is taken over by the node accepted there; where none was, it stays.
        place = count.clamp(max=width - 1)
        nodes[each, place] = torch.where(taken, node, nodes[each, place])
        rejected[:, node] = is_child & ~taken
        rejected &= ~taken[:, None]
        last, count = torch.where(taken, node, last), count + taken
        reached = torch.where(taken, 0.0, reached)
    here = probs[each, last + 1]
    # Rejected tokens are taken out; the others' entries go to a spare column.
    spare = torch.where(rejected, tokens.long(), here.shape[1])
    left = torch.nn.functional.pad(here, (0, 1)).scatter_(1, spare, 0.0)[:, :-1]
    u = finals[each, count]
    bonus = _draw_each(left, u)
    return AcceptedBatch(nodes, count, torch.where(bonus == NO_TOKEN, _draw_each(here, u), bonus))


def _draw_each(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """kernels.sampling.sample for rows of probs float64 [B, V]: int64 [B]."""
    sums = probs.cumsum(dim=1)
    found = torch.searchsorted(sums, (u * sums[:, -1])[:, None], right=True)[:, 0]
    ids = torch.arange(probs.shape[1], device=probs.device)
    last = torch.where(probs > 0.0, ids, NO_TOKEN).amax(dim=1)
    return torch.minimum(found, last)


def accept_thresholds(
    parents: Sequence[int],
    tokens: Sequence[int],
    probs: Callable[[int], npt.NDArray[np.float64] | None],
    coin: Callable[[int], float],
    final: Callable[[int], float],
    *,
    threshold_single: float,
    threshold_acc: float,
) -> Accepted:
    """The threshold rule (SGLang's speculative_sampling.cuh), lossless when both thresholds are 1.0.

    `probs(row)` is the filtered distribution float64 [V] at a row, or None where there is none; it is called for
    visited rows only, once each. `coin(depth)` and `final(depth)` are uniform in [0, 1) for the token below a node of
    that depth (the root: 0): the first is shared by that node's children, the second draws the bonus. Thresholds are
    in [0, 1].

    Children are tried in ascending index. One is accepted when the coin is at most the sum of its and its elder
    siblings' probabilities over threshold_acc, or its own reaches threshold_single; the bonus comes from what rejected
    children leave. Unlike there, a token of probability 0 is neither accepted nor drawn: filters and grammars forbid
    it.
    """
    nodes: list[int] = []
    last, here, reached = -1, probs(0), 0.0
    rejected: list[int] = []
    scale = max(threshold_acc, _LEAST_THRESHOLD)
    toss = coin(0)
    for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
        if parent != last or here is None:
            continue
        own = float(here[token])
        reached += own
        if own > 0.0 and (toss <= reached / scale or own >= threshold_single):
            nodes.append(node)
            last, here, reached, rejected = node, probs(node + 1), 0.0, []
            toss = coin(len(nodes))
        else:
            rejected.append(token)
    return Accepted(nodes, NO_TOKEN if here is None else _leftover(here, rejected, final(len(nodes))))


def _leftover(probs: npt.NDArray[np.float64], rejected: list[int], u: float) -> int:
    """A draw from `probs` without the rejected tokens; from all of it when rounding left them everything."""
    left = probs.copy()
    left[rejected] = 0.0
    token = sample(left, u)
    return sample(probs, u) if token == NO_TOKEN else token
