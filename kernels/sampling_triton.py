"""kernels.sampling on a CUDA device, in Triton: one program draws one row's token, nothing is read back.

No row is sorted. A float's bits, turned so that they rise with it, let the k-th largest logit and the bound of top-p be
found two bits at a time: 16 passes over a row that lies in the L2 cache, each of which counts, or adds weights up, from
three bounds. (From seven, the comparisons would take more than the passes saved.) What is dropped weighs 0 from then
on. A row's sums are taken in the same order whatever rows go with it.
"""

from __future__ import annotations

import typing as tp  # Triton's compiler refuses a bare `Any` in a kernel's annotations

import torch
import triton.language as tl

from kernels.sampling_torch import RowFilters
from kernels.triton_common import jit

# Of the vocabulary at a time, and warps for it: a row of 128k is drawn greedily in 23 us on an H200, with 1,024 and 4
# warps in 73; sampled at temperature 1, with two scans and two passes more than now, in 237 and 527.
_VOCAB_BLOCK, _NUM_WARPS = 8192, 16
# Of it at a time in a search, whose three sums of each place stay in registers till the end of a pass.
_SEARCH_BLOCK = 2048
# Weights in float64 lie in memory between passes: 128 rows of 128k take 128 MB.
_ROWS_AT_ONCE = 128


def draw_rows(logits: torch.Tensor, rows: torch.Tensor, filters: RowFilters, u: torch.Tensor) -> torch.Tensor:
    """Computes kernels.sampling_torch.draw_rows."""
    vocab = logits.shape[1]
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    count = min(len(rows), _ROWS_AT_ONCE)
    scratch = torch.empty((count, vocab), dtype=torch.float64, device=logits.device)
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        _draw_row[(len(rows[part]),)](
            logits, rows[part], *filters.rows(part)[:4], u[part], scratch, tokens[part], LOGIT_ROW=logits.stride(0),
            VOCAB=vocab, BLOCK=_VOCAB_BLOCK, SEARCH_BLOCK=_SEARCH_BLOCK, num_warps=_NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return tokens


@jit
def _draw_row(
    logits: tp.Any, rows: tp.Any, temperature: tp.Any, top_k: tp.Any, top_p: tp.Any, min_p: tp.Any, u: tp.Any,
    scratch: tp.Any, tokens: tp.Any, LOGIT_ROW: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = logits + tl.load(rows + program) * LOGIT_ROW
    weights = scratch + program * VOCAB
    heat = tl.load(temperature + program)
    largest, best, is_there = _largest(row, VOCAB, BLOCK)
    if not is_there:
        tl.store(tokens + program, -1)
    elif heat == 0.0:
        tl.store(tokens + program, best)
    else:
        _store_weights(row, weights, largest, heat, VOCAB, BLOCK)
        wanted = tl.load(top_k + program)
        if (wanted > 0) & (wanted < VOCAB):
            all_of_it = tl.full([], VOCAB, tl.int64)
            bound, reached, above = _bound(row, weights, wanted, all_of_it, False, VOCAB, SEARCH_BLOCK)
            _drop(row, weights, bound, wanted - above, reached > wanted, VOCAB, BLOCK)
        share = tl.load(top_p + program)
        if share < 1.0:
            _drop_by_mass(row, weights, share, VOCAB, BLOCK, SEARCH_BLOCK)
        least = tl.load(min_p + program)
        tl.store(tokens + program, _located(weights, least, tl.load(u + program), VOCAB, BLOCK))


@jit
def _largest(row: tp.Any, VOCAB: tl.constexpr, BLOCK: tl.constexpr) -> tuple[tp.Any, tp.Any, tp.Any]:
    """The largest logit, its lowest id, and whether the row has a distribution: no NaN, no inf, and something."""
    top = tl.full([], float("-inf"), tl.float32)
    best = tl.full([], 0, tl.int64)
    num_bad = tl.full([], 0, tl.int32)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < VOCAB, other=float("-inf"))
        num_bad += tl.sum(((x != x) | (x == float("inf"))).to(tl.int32), 0)
        here = tl.max(x, 0)
        first = tl.min(tl.where(x == here, ids, VOCAB), 0).to(tl.int64)
        best = tl.where(here > top, first, best)
        top = tl.where(here > top, here, top)
    return top, best, (num_bad == 0) & (top > float("-inf"))


@jit
def _store_weights(
    row: tp.Any, weights: tp.Any, largest: tp.Any, heat: tp.Any, VOCAB: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < VOCAB, other=float("-inf"))
        scaled = (x.to(tl.float64) - largest.to(tl.float64)) / heat
        tl.store(weights + ids, tl.exp(scaled), mask=ids < VOCAB)
    tl.debug_barrier()  # other threads of this program read what was written


@jit
def _keys(row: tp.Any, ids: tp.Any, VOCAB: tl.constexpr) -> tp.Any:
    """int64 that rise with the logits, from 0; equal logits, -0 and 0 too, have equal keys; -1 outside."""
    x = tl.load(row + ids, mask=ids < VOCAB, other=0.0)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(ids < VOCAB, tl.where(bits < 0, -1 - bits - 2147483648, bits) + 2147483648, -1)


@jit
def _bound(
    row: tp.Any, weights: tp.Any, wanted: tp.Any, total: tp.Any, BY_MASS: tl.constexpr, VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tp.Any, tp.Any, tp.Any]:  # fmt: skip
    """The largest key that `wanted` of the `total` is reached from: by counting keys, or by adding their weights up.

    Also what is reached from it, and from above it.
    """
    bound, step = tl.full([], 0, tl.int64), tl.full([], 1073741824, tl.int64)
    reached, above = total, total * 0
    while step > 0:
        one, two, three = _reached(row, weights, bound + step, step, BY_MASS, VOCAB, BLOCK)
        if three >= wanted:
            bound += 3 * step
            reached = three
        elif two >= wanted:
            bound += 2 * step
            reached, above = two, three
        elif one >= wanted:
            bound += step
            reached, above = one, two
        else:
            above = one
        step = step // 4
    return bound, reached, above


@jit
def _reached(
    row: tp.Any, weights: tp.Any, low: tp.Any, step: tp.Any, BY_MASS: tl.constexpr, VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tp.Any, tp.Any, tp.Any]:  # fmt: skip
    """How many keys, or which weights together, are at least `low`, a step above and two: never more of the latter."""
    one = tl.zeros([BLOCK], tl.float64 if BY_MASS else tl.int64)
    two, three = one, one
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        keys = _keys(row, ids, VOCAB)
        each = tl.load(weights + ids, mask=ids < VOCAB, other=0.0) if BY_MASS else tl.full([BLOCK], 1, tl.int64)
        one += tl.where(keys >= low, each, 0)
        two += tl.where(keys >= low + step, each, 0)
        three += tl.where(keys >= low + 2 * step, each, 0)
    return tl.sum(one, 0), tl.sum(two, 0), tl.sum(three, 0)


@jit
def _drop_by_mass(
    row: tp.Any, weights: tp.Any, share: tp.Any, VOCAB: tl.constexpr, BLOCK: tl.constexpr, SEARCH_BLOCK: tl.constexpr
) -> None:
    """Leaves the fewest, largest weights that reach `share` of their sum."""
    zero = tl.full([], 0, tl.int64)
    total, _, _ = _reached(row, weights, zero, zero, True, VOCAB, SEARCH_BLOCK)
    target = share * total
    bound, _, above = _bound(row, weights, target, total, True, VOCAB, SEARCH_BLOCK)
    count, weight = _ties_at(row, weights, bound, VOCAB, BLOCK)
    # One tie after another until the sum reaches the target.
    num_ties = tl.maximum(1, tl.ceil((target - above) / weight).to(tl.int64))
    _drop(row, weights, bound, num_ties, num_ties < count, VOCAB, BLOCK)


@jit
def _ties_at(
    row: tp.Any, weights: tp.Any, bound: tp.Any, VOCAB: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tp.Any, tp.Any]:
    """How many of the keys that equal `bound` are not dropped, and what each weighs."""
    count = tl.full([], 0, tl.int64)
    weight = tl.full([], 0.0, tl.float64)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        is_tie = _keys(row, ids, VOCAB) == bound
        here = tl.load(weights + ids, mask=is_tie, other=0.0)
        count += tl.sum((here > 0.0).to(tl.int64), 0)
        weight = tl.maximum(weight, tl.max(here, 0))
    return count, weight


@jit
def _drop(
    row: tp.Any, weights: tp.Any, bound: tp.Any, num_ties: tp.Any, is_cut: tp.Any, VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Clears the weights of keys below `bound`; where those at it are cut, all of theirs but the first `num_ties`."""
    ties = tl.full([], 0, tl.int64)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        keys = _keys(row, ids, VOCAB)
        dropped = keys < bound
        if is_cut:  # seldom: to rank ties takes longer than all else
            is_tie = keys == bound
            dropped = dropped | (is_tie & (ties + tl.cumsum(is_tie.to(tl.int64), 0) > num_ties))
            ties += tl.sum(is_tie.to(tl.int64), 0)
        tl.store(weights + ids, tl.zeros([BLOCK], tl.float64), mask=dropped & (ids < VOCAB))
    tl.debug_barrier()


@jit
def _located(
    weights: tp.Any, least: tp.Any, u: tp.Any, VOCAB: tl.constexpr, BLOCK: tl.constexpr
) -> tp.Any:  # fmt: skip
    """The inverse-CDF draw from the weights that are at least `least`."""
    total = tl.full([], 0.0, tl.float64)
    highest = tl.full([], 0, tl.int64)
    for start in range(0, VOCAB, BLOCK):
        ids, kept = _kept(weights, least, start, VOCAB, BLOCK)
        total += tl.sum(kept, 0)
        highest = tl.maximum(highest, tl.max(tl.where(kept > 0.0, ids, 0), 0).to(tl.int64))
    # Where rounding leaves no running sum above the mark: the last token kept.
    mark, before, chosen = u * total, total * 0.0, highest
    start = 0
    while start < VOCAB:
        ids, kept = _kept(weights, least, start, VOCAB, BLOCK)
        above = (before + tl.cumsum(kept, 0) > mark) & (kept > 0.0)
        first = tl.min(tl.where(above, ids, VOCAB), 0)
        before += tl.sum(kept, 0)
        start += BLOCK
        if first < VOCAB:
            chosen = first.to(tl.int64)
            start = VOCAB
    return chosen


@jit
def _kept(
    weights: tp.Any, least: tp.Any, start: tp.Any, VOCAB: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tp.Any, tp.Any]:
    """A block's ids, and its weights, 0 where dropped."""
    ids = start + tl.arange(0, BLOCK)
    w = tl.load(weights + ids, mask=ids < VOCAB, other=0.0)
    return ids, tl.where(w >= least, w, 0.0)
