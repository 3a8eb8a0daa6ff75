"""kernels.sampling on a CUDA device, in Triton: one program draws one row's token, nothing is read back.

No row is sorted. A float's bits, turned so that they rise with it, let the k-th largest logit and the bound of top-p be
found bit by bit: 32 passes over a row that lies in the L2 cache, each of which counts, or adds weights up. A row's sums
are taken in the same order whatever rows go with it.
"""

from __future__ import annotations

import typing as tp  # Triton's compiler refuses a bare `Any` in a kernel's annotations

import torch
import triton.language as tl

from kernels.sampling_torch import RowFilters
from kernels.triton_common import jit

# Of the vocabulary at a time, and warps for it: a row of 128k is drawn greedily in 23 us on an H200, with 1,024 and 4
# warps in 73; sampled at temperature 1 in 237 and 527.
_VOCAB_BLOCK, _NUM_WARPS = 8192, 16
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
            VOCAB=vocab, BLOCK=_VOCAB_BLOCK, num_warps=_NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return tokens


@jit
def _draw_row(
    logits: tp.Any, rows: tp.Any, temperature: tp.Any, top_k: tp.Any, top_p: tp.Any, min_p: tp.Any, u: tp.Any,
    scratch: tp.Any, tokens: tp.Any, LOGIT_ROW: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
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
        # Kept: keys above `bound`, and the first `num_ties` of those equal to it.
        bound, num_ties = tl.full([], 0, tl.int64), tl.full([], VOCAB, tl.int64)
        wanted = tl.load(top_k + program)
        if (wanted > 0) & (wanted < VOCAB):
            bound = _kth_key(row, wanted, VOCAB, BLOCK)
            num_ties = wanted - _count_from(row, bound + 1, VOCAB, BLOCK)
        share = tl.load(top_p + program)
        if share < 1.0:
            bound, num_ties = _mass_bound(row, weights, share, bound, num_ties, VOCAB, BLOCK)
        least = tl.load(min_p + program)
        tl.store(
            tokens + program,
            _located(row, weights, bound, num_ties, least, tl.load(u + program), VOCAB, BLOCK),
        )


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
def _count_from(row: tp.Any, bound: tp.Any, VOCAB: tl.constexpr, BLOCK: tl.constexpr) -> tp.Any:
    """How many keys are at least `bound`."""
    count = tl.full([], 0, tl.int64)
    for start in range(0, VOCAB, BLOCK):
        keys = _keys(row, start + tl.arange(0, BLOCK), VOCAB)
        count += tl.sum((keys >= bound).to(tl.int64), 0)
    return count


@jit
def _kth_key(row: tp.Any, wanted: tp.Any, VOCAB: tl.constexpr, BLOCK: tl.constexpr) -> tp.Any:
    """The wanted-th largest key: the largest that so many reach."""
    bound = tl.full([], 0, tl.int64)
    step = tl.full([], 2147483648, tl.int64)
    while step > 0:
        if _count_from(row, bound + step, VOCAB, BLOCK) >= wanted:
            bound += step
        step = step // 2
    return bound


@jit
def _mass_from(
    row: tp.Any, weights: tp.Any, low: tp.Any, bound: tp.Any, num_ties: tp.Any, VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tp.Any:  # fmt: skip
    """The weights, of those kept by (bound, num_ties), whose keys are at least `low`."""
    mass = tl.full([], 0.0, tl.float64)
    ties = tl.full([], 0, tl.int64)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        keys = _keys(row, ids, VOCAB)
        w = tl.load(weights + ids, mask=ids < VOCAB, other=0.0)
        is_tie = keys == bound
        rank = ties + tl.cumsum(is_tie.to(tl.int64), 0)
        kept = (keys > bound) | (is_tie & (rank <= num_ties))
        mass += tl.sum(tl.where(kept & (keys >= low), w, 0.0), 0)
        ties += tl.sum(is_tie.to(tl.int64), 0)
    return mass


@jit
def _mass_bound(
    row: tp.Any, weights: tp.Any, share: tp.Any, bound: tp.Any, num_ties: tp.Any, VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tp.Any, tp.Any]:  # fmt: skip
    """The bound and its ties of the fewest, largest weights kept so far that reach `share` of their sum."""
    target = share * _mass_from(row, weights, 0, bound, num_ties, VOCAB, BLOCK)
    low = tl.full([], 0, tl.int64)
    step = tl.full([], 2147483648, tl.int64)
    while step > 0:
        if _mass_from(row, weights, low + step, bound, num_ties, VOCAB, BLOCK) >= target:
            low += step
        step = step // 2
    above = _mass_from(row, weights, low + 1, bound, num_ties, VOCAB, BLOCK)
    count, weight = _ties_at(row, weights, low, VOCAB, BLOCK)
    if low == bound:
        count = tl.minimum(count, num_ties)
    # One tie after another until the sum reaches the target.
    wanted = tl.ceil((target - above) / weight).to(tl.int64)
    return low, tl.maximum(1, tl.minimum(count, wanted))


@jit
def _ties_at(
    row: tp.Any, weights: tp.Any, bound: tp.Any, VOCAB: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tp.Any, tp.Any]:
    """How many keys equal `bound`, and what each weighs."""
    count = tl.full([], 0, tl.int64)
    weight = tl.full([], 0.0, tl.float64)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        is_tie = _keys(row, ids, VOCAB) == bound
        count += tl.sum(is_tie.to(tl.int64), 0)
        here = tl.load(weights + ids, mask=is_tie, other=0.0)
        weight = tl.maximum(weight, tl.max(here, 0))
    return count, weight


@jit
def _located(
    row: tp.Any, weights: tp.Any, bound: tp.Any, num_ties: tp.Any, least: tp.Any, u: tp.Any, VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tp.Any:  # fmt: skip
    """The inverse-CDF draw from what is kept."""
    total = tl.full([], 0.0, tl.float64)
    ties = tl.full([], 0, tl.int64)
    highest = tl.full([], 0, tl.int64)
    for start in range(0, VOCAB, BLOCK):
        kept, ties = _kept(row, weights, bound, num_ties, least, ties, start, VOCAB, BLOCK)
        total += tl.sum(kept, 0)
        ids = start + tl.arange(0, BLOCK)
        highest = tl.maximum(highest, tl.max(tl.where(kept > 0.0, ids, 0), 0).to(tl.int64))
    # Where rounding leaves no running sum above the mark: the last token kept.
    mark, before, chosen = u * total, total * 0.0, highest
    ties = tl.full([], 0, tl.int64)
    start = 0
    while start < VOCAB:
        kept, ties = _kept(row, weights, bound, num_ties, least, ties, start, VOCAB, BLOCK)
        ids = start + tl.arange(0, BLOCK)
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
    row: tp.Any, weights: tp.Any, bound: tp.Any, num_ties: tp.Any, least: tp.Any, ties: tp.Any, start: tp.Any,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
) -> tuple[tp.Any, tp.Any]:  # fmt: skip
    """A block of the weights, 0 where dropped, and the ties at the bound up to its end."""
    ids = start + tl.arange(0, BLOCK)
    keys = _keys(row, ids, VOCAB)
    w = tl.load(weights + ids, mask=ids < VOCAB, other=0.0)
    is_tie = keys == bound
    rank = ties + tl.cumsum(is_tie.to(tl.int64), 0)
    kept = ((keys > bound) | (is_tie & (rank <= num_ties))) & (w >= least)
    return tl.where(kept, w, 0.0), ties + tl.sum(is_tie.to(tl.int64), 0)
