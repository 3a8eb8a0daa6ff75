"""kernels.tree_growth.grow_on on a CUDA device, in Triton: a launch a step instead of some twenty.

A program makes one new entry of one tree: each finds the likeliest candidates for itself, of a few numbers, and stops
at the one of its own rank. Its speed has not been measured.
"""

from __future__ import annotations

import typing as tp  # Triton's compiler refuses a bare `Any` in a kernel's annotations

import torch
import triton
import triton.language as tl

from kernels.likeliest_triton import LEAST, id_of, keys, number_of
from kernels.tree_growth import GrowingTrees
from kernels.triton_common import jit

_MOST_BLOCK = 4096


def grow_on(
    trees: GrowingTrees, step: int, chances: torch.Tensor, ids: torch.Tensor, states: torch.Tensor,
    names: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Computes kernels.tree_growth.grow_on."""
    (batch, entries), topk, hidden = trees.tokens.shape, trees.topk, trees.inputs.shape[2]
    parents, words = 1 if step == 0 else topk, trees.bits.shape[2]
    _grow_on[(batch, topk)](
        chances.contiguous(), ids.contiguous(), ids if names is None else names, states.contiguous(), trees.tokens,
        trees.bits, trees.inputs, trees.states, trees.found, trees.reach, trees.own, batch, step, entries,
        trees.num_candidates,
        TOPK=topk, PARENTS=parents, WORDS=words, HIDDEN=hidden, IS_FIRST=step == 0,
        IS_LAST=step == trees.num_steps - 1, HAS_NAMES=names is not None,
        BLOCK_C=triton.next_power_of_2(parents * topk), BLOCK_W=triton.next_power_of_2(words),
        BLOCK_H=min(_MOST_BLOCK, triton.next_power_of_2(hidden)), num_warps=4,
    )  # fmt: skip


@jit(do_not_specialize=("batch", "step", "entries", "most"))
def _grow_on(
    chances: tp.Any, ids: tp.Any, names: tp.Any, came_out: tp.Any, tokens: tp.Any, bits: tp.Any, inputs: tp.Any,
    states: tp.Any, found: tp.Any, reach: tp.Any, own: tp.Any, batch: tp.Any, step: tp.Any, entries: tp.Any,
    most: tp.Any,
    TOPK: tl.constexpr, PARENTS: tl.constexpr, WORDS: tl.constexpr, HIDDEN: tl.constexpr, IS_FIRST: tl.constexpr,
    IS_LAST: tl.constexpr, HAS_NAMES: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:  # fmt: skip
    """Programs [B, K]; of the last step they have no entry to make."""
    tree, rank = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chances += tree * PARENTS * TOPK
    ids += tree * PARENTS * TOPK
    came_out += tree * PARENTS * HIDDEN
    found += tree * (2 * most + entries)
    c = tl.arange(0, BLOCK_C)
    inside = c < PARENTS * TOPK
    chance = tl.load(chances + c, mask=inside, other=0.0)
    score = tl.where(chance > 0.0, tl.minimum(chance, 1.0), 0.0)  # NaN counts as 0
    first = 0
    if not IS_FIRST:
        score *= tl.load(reach + ((step - 1) * batch + tree) * TOPK + c // TOPK, mask=inside, other=0.0)
        first = TOPK + (step - 1) * TOPK * TOPK
        # What came out of the entries of the step before stays.
        kept = states + ((1 + (step - 1) * TOPK) * batch + tree * TOPK + rank) * HIDDEN
        _copy_row(came_out + rank * HIDDEN, kept, HIDDEN, BLOCK_H)
    if rank == 0:
        every = tl.load(ids + c, mask=inside, other=0)
        if HAS_NAMES:
            every = tl.load(names + every, mask=inside, other=0)
        tl.store(found + first + c, score.to(tl.float64).to(tl.int64, bitcast=True), mask=inside)
        tl.store(found + most + first + c, every, mask=inside)
    if not IS_LAST:
        left = tl.where(inside, keys(score, c), LEAST)
        if IS_FIRST:  # all of them go on, in their order
            left = tl.where(c == rank, left, LEAST)
        best = tl.max(left, 0)
        if not IS_FIRST:
            for _ in range(rank):
                left = tl.where(left == best, LEAST, left)
                best = tl.max(left, 0)
        chosen = id_of(best)
        parent = chosen // TOPK
        token = tl.load(ids + chosen)
        if HAS_NAMES:
            token = tl.load(names + token)
        here = step * TOPK + rank
        tl.store(reach + (step * batch + tree) * TOPK + rank, number_of(best))
        tl.store(found + 2 * most + here, first + chosen)
        word = tl.arange(0, BLOCK_W)
        is_word = word < WORDS
        if IS_FIRST:
            # Rows that are not known yet are the first step's, as in kernels.tree_growth.
            for later in range(entries // TOPK):
                at = later * TOPK + rank
                row = tree * entries + at
                tl.store(tokens + row, token)
                tl.store(bits + row * WORDS + word, tl.load(own + at * WORDS + word, mask=is_word), mask=is_word)
                _copy_row(came_out, inputs + row * HIDDEN, HIDDEN, BLOCK_H)
        else:
            row, above = tree * entries + here, tree * entries + (step - 1) * TOPK + parent
            seen = tl.load(bits + above * WORDS + word, mask=is_word)
            tl.store(tokens + row, token)
            tl.store(bits + row * WORDS + word, seen | tl.load(own + here * WORDS + word, mask=is_word), mask=is_word)
            _copy_row(came_out + parent * HIDDEN, inputs + row * HIDDEN, HIDDEN, BLOCK_H)


@jit
def _copy_row(source: tp.Any, target: tp.Any, HIDDEN: tl.constexpr, BLOCK_H: tl.constexpr) -> None:
    for start in range(0, HIDDEN, BLOCK_H):
        column = start + tl.arange(0, BLOCK_H)
        inside = column < HIDDEN
        tl.store(target + column, tl.load(source + column, mask=inside), mask=inside)
