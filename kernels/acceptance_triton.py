"""kernels.acceptance on a CUDA device, in Triton: the walks of a whole batch in one launch, nothing read back.

One program walks one session's tree. Its nodes lie in registers, so a step down is a comparison of all nodes at once
and costs no trip to memory but for the next row's token or distribution; a walk takes as many steps as it accepts
nodes, plus one. Same rules, shapes and ties as there. Its speed has not been measured.
"""

from __future__ import annotations

import typing as tp  # Triton's compiler refuses a bare `Any` in a kernel's annotations

import torch
import triton.language as tl

from kernels.acceptance import AcceptedBatch
from kernels.triton_common import jit

# Of the vocabulary at a time, in the draw of the bonus: 8 numbers a thread, two loads of 32 bytes in flight.
_VOCAB_BLOCK = 1024


def accept_coupled_batch(
    parents: torch.Tensor, tokens: torch.Tensor, num_nodes: torch.Tensor, target_tokens: torch.Tensor
) -> AcceptedBatch:
    """Computes kernels.acceptance.accept_coupled_batch.

    parents, tokens [B, n]; num_nodes [B]; target_tokens [B, n + 1].
    """
    batch, width = tokens.shape
    accepted = _empty(batch, width, tokens.device)
    _walk_coupled[(batch,)](
        parents.contiguous(), tokens.contiguous(), num_nodes, target_tokens.contiguous(), *accepted,
        WIDTH=width, BLOCK=_block(width), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return accepted


def accept_thresholds_batch(
    parents: torch.Tensor, tokens: torch.Tensor, num_nodes: torch.Tensor, probs: torch.Tensor, coins: torch.Tensor,
    finals: torch.Tensor, threshold_single: torch.Tensor, threshold_acc: torch.Tensor,
) -> AcceptedBatch:  # fmt: skip
    """kernels.acceptance.accept_thresholds for B trees of at most n nodes.

    parents, tokens: integer [B, n], of which the first num_nodes [B] count; probs float64 [B, n + 1, V]: filtered
    distributions by row, all zeros where there is none; coins, finals float64 [B, n + 1] by depth; thresholds
    float64 [B], each session's own.
    """
    batch, width = tokens.shape
    accepted = _empty(batch, width, tokens.device)
    _walk_thresholds[(batch,)](
        parents.contiguous(), tokens.contiguous(), num_nodes, probs.contiguous(), coins.contiguous(),
        finals.contiguous(), threshold_single, threshold_acc, *accepted,
        WIDTH=width, VOCAB=probs.shape[2], BLOCK=_block(width), VOCAB_BLOCK=_VOCAB_BLOCK, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return accepted


def _empty(batch: int, width: int, device: torch.device) -> AcceptedBatch:
    sizes = ((batch, width), (batch,), (batch,))
    return AcceptedBatch(*(torch.empty(size, dtype=torch.int64, device=device) for size in sizes))


def _block(width: int) -> int:
    return 1 << max(0, width - 1).bit_length()


@jit
def _walk_coupled(
    parents: tp.Any, tokens: tp.Any, num_nodes: tp.Any, target_tokens: tp.Any,
    nodes_out: tp.Any, num_out: tp.Any, bonus_out: tp.Any, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    session = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK)
    there = node < tl.load(num_nodes + session)
    parent = tl.load(parents + session * WIDTH + node, mask=there, other=-2)
    token = tl.load(tokens + session * WIDTH + node, mask=there, other=-2).to(tl.int64)
    drawn = target_tokens + session * (WIDTH + 1)
    drawn_below = tl.load(drawn + 1 + node, mask=there, other=-1).to(tl.int64)
    wanted = tl.load(drawn).to(tl.int64)
    path = tl.full([BLOCK], -1, tl.int64)
    count = 0
    child = tl.min(tl.where(there & (parent == -1) & (token == wanted), node, BLOCK), 0)
    while child < BLOCK:
        path = tl.where(node == count, child, path)
        count += 1
        wanted = tl.sum(tl.where(node == child, drawn_below, 0), 0)
        child = tl.min(tl.where(there & (parent == child) & (token == wanted), node, BLOCK), 0)
    tl.store(nodes_out + session * WIDTH + node, path, mask=node < WIDTH)
    tl.store(num_out + session, count)
    tl.store(bonus_out + session, wanted)


@jit
def _walk_thresholds(
    parents: tp.Any, tokens: tp.Any, num_nodes: tp.Any, probs: tp.Any, coins: tp.Any,
    finals: tp.Any, threshold_single: tp.Any, threshold_acc: tp.Any,
    nodes_out: tp.Any, num_out: tp.Any, bonus_out: tp.Any,
    WIDTH: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr, VOCAB_BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    session = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK)
    count_there = tl.load(num_nodes + session).to(tl.int32)
    own_parents, own_tokens = parents + session * WIDTH, tokens + session * WIDTH
    parent = tl.load(own_parents + node, mask=node < count_there, other=-2)
    token = tl.load(own_tokens + node, mask=node < count_there, other=0)
    single, scale = tl.load(threshold_single + session), tl.maximum(tl.load(threshold_acc + session), 1e-9)
    row = probs + session * (WIDTH + 1) * VOCAB
    coins += session * (WIDTH + 1)
    path = tl.full([BLOCK], -1, tl.int64)
    here, last, count = row, -1, 0
    child = _first_accepted(here, node, parent, token, last, tl.load(coins), single, scale, BLOCK)
    while child < BLOCK:
        path = tl.where(node == count, child, path)
        last = child
        count += 1
        here = row + (child + 1).to(tl.int64) * VOCAB
        child = _first_accepted(here, node, parent, token, last, tl.load(coins + count), single, scale, BLOCK)
    tl.store(nodes_out + session * WIDTH + node, path, mask=node < WIDTH)
    tl.store(num_out + session, count)

    # None of the last row's children was accepted: the bonus comes from what they leave, or, where rounding gave them
    # everything, from all of it (no node has parent -2).
    u = tl.load(finals + session * (WIDTH + 1) + count)
    bonus = _draw(here, own_parents, own_tokens, count_there, last, u, VOCAB, VOCAB_BLOCK)
    if bonus < 0:
        bonus = _draw(here, own_parents, own_tokens, count_there, -2, u, VOCAB, VOCAB_BLOCK)
    tl.store(bonus_out + session, bonus)


@jit
def _first_accepted(
    here: tp.Any, node: tp.Any, parent: tp.Any, token: tp.Any, last: tp.Any, toss: tp.Any,
    single: tp.Any, scale: tp.Any, BLOCK: tl.constexpr,
) -> tp.Any:  # fmt: skip
    """The first child of `last` that the rule accepts, or BLOCK."""
    is_child = parent == last
    own = tl.load(here + token, mask=is_child, other=0.0)
    reached = tl.cumsum(own, 0)
    taken = is_child & (own > 0.0) & ((toss <= reached / scale) | (own >= single))
    return tl.min(tl.where(taken, node, BLOCK), 0)


@jit
def _draw(
    here: tp.Any, parents: tp.Any, tokens: tp.Any, num_nodes: tp.Any, last: tp.Any, u: tp.Any,
    VOCAB: tl.constexpr, VOCAB_BLOCK: tl.constexpr,
) -> tp.Any:  # fmt: skip
    """The inverse-CDF draw from a distribution without the tokens of `last`'s children; -1 when nothing is left."""
    total = tl.sum(tl.zeros([VOCAB_BLOCK], tl.float64), 0)
    highest = -1
    for start in range(0, VOCAB, VOCAB_BLOCK):
        left = _left(here, parents, tokens, num_nodes, last, start, VOCAB, VOCAB_BLOCK)
        total += tl.sum(left, 0)
        ids = start + tl.arange(0, VOCAB_BLOCK)
        highest = tl.maximum(highest, tl.max(tl.where(left > 0.0, ids, -1), 0))
    # Where rounding leaves no running sum above the mark: the last token of positive probability.
    chosen, start = highest, 0
    mark, before = u * total, total * 0.0
    while start < VOCAB:
        left = _left(here, parents, tokens, num_nodes, last, start, VOCAB, VOCAB_BLOCK)
        ids = start + tl.arange(0, VOCAB_BLOCK)
        above = (before + tl.cumsum(left, 0) > mark) & (left > 0.0)
        first = tl.min(tl.where(above, ids, VOCAB), 0)
        before += tl.sum(left, 0)
        start += VOCAB_BLOCK
        if first < VOCAB:
            chosen = first
            start = VOCAB
    return chosen


@jit
def _left(
    here: tp.Any, parents: tp.Any, tokens: tp.Any, num_nodes: tp.Any, last: tp.Any, start: tp.Any,
    VOCAB: tl.constexpr, VOCAB_BLOCK: tl.constexpr,
) -> tp.Any:  # fmt: skip
    """A block of the distribution, without the tokens of `last`'s children."""
    ids = start + tl.arange(0, VOCAB_BLOCK)
    left = tl.load(here + ids, mask=ids < VOCAB, other=0.0)
    for node in range(0, num_nodes):
        if tl.load(parents + node) == last:
            left = tl.where(ids == tl.load(tokens + node), 0.0, left)
    return left
