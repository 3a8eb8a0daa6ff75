"""Choosing tokens from logits: filters and the inverse-CDF draw, one row at a time.

The numbers follow one rule everywhere: logits are float32, softmax and sums float64, filters come in the order
temperature, top-k, top-p, min-p, each on what the one before left (as `transformers` chains its warpers), and ties go
to the lowest id. After temperature T a token weighs w = exp((logit - largest logit) / T):

    top-k   keeps the k largest logits; ties at the last place go to the lowest ids (0: all)
    top-p   of the kept weights in falling order, keeps each whose predecessors sum to less than top_p of all (1: all)
    min-p   keeps w >= min_p (the likeliest token has w = 1)
    draw    the first id, in vocabulary order, with w > 0 whose running sum exceeds u * (sum of kept w)

Temperature 0 takes the largest logit. Every row is computed alone and by one thread, in NumPy over host memory: its
result is the same bits whatever rows stand beside it and however many threads torch has. A row that holds NaN or
+inf, or nothing but -inf, has no distribution; it gets token -1 and is named, and the others never notice.
This file knows nothing of penalties, grammars and trees; they shape logits before, or walk over tokens after.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

NO_TOKEN: Final = -1

# Running sums go block by block: sums of 256 cost a pass at memory speed, one sequential sum ten times that.
_SUM_BLOCK: Final = 256
# Logits in a group whose maximum bounds the k-th largest: fewer cost a longer selection, more let more candidates in.
_MAX_GROUP: Final = 64
# Up to this many weights, sorting them all costs less than a histogram first.
_SORT_LIMIT: Final = 2048
_BIN_SHIFT: Final = 52 - 6

Row = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Filters:
    """How one row's distribution is cut. ValueError for what is out of range or not a number."""

    temperature: float = 1.0
    """At least 0; 0 is greedy."""
    top_k: int = 0
    """At least 0; 0 keeps all."""
    top_p: float = 1.0
    """In (0, 1]."""
    min_p: float = 0.0
    """In [0, 1]."""

    def __post_init__(self) -> None:
        if not (0.0 <= self.temperature < math.inf):
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0, got {self.top_k}")
        if not (0.0 < self.top_p <= 1.0):
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not (0.0 <= self.min_p <= 1.0):
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1


class _Kept(NamedTuple):
    """What the filters left of a row: ids ascending (None: the whole vocabulary) and their weights."""

    ids: Ids | None
    weights: Weights


def choose(logits: torch.Tensor, filters: Sequence[Filters], u: Sequence[float] | Weights) -> Ids:
    """Tokens int64 [R] of `logits` float32 [R, V], each row by its own filters and its own u in [0, 1).

    -1 where a row has no distribution. Logits on another device are copied to the host first.
    """
    rows = logits.detach().cpu().numpy()
    tokens = [draw(row, f, float(x)) for row, f, x in zip(rows, filters, u, strict=True)]
    return np.array(tokens, dtype=np.int64)


def draw(row: Row, filters: Filters, u: float) -> int:
    """The token of one row float32 [V] for u in [0, 1), which is unused if greedy; -1 without a distribution."""
    best = int(row.argmax())
    if not math.isfinite(row[best]):
        return NO_TOKEN
    if filters.is_greedy:
        return best
    kept = _keep(row, float(row[best]), filters)
    index = _locate(kept.weights, u)
    return index if kept.ids is None else int(kept.ids[index])


def filtered_row(row: Row, filters: Filters) -> Weights | None:
    """The distribution that `draw` draws from, float64 [V] summing to 1 (greedy: one-hot); None if there is none."""
    best = int(row.argmax())
    if not math.isfinite(row[best]):
        return None
    probs = np.zeros(len(row))
    if filters.is_greedy:
        probs[best] = 1.0
        return probs
    kept = _keep(row, float(row[best]), filters)
    scaled = kept.weights / kept.weights.sum()
    if kept.ids is None:
        return scaled
    probs[kept.ids] = scaled
    return probs


def sample(probs: Weights, u: float) -> int:
    """The inverse-CDF draw from non-negative `probs` float64 [V] of any sum; -1 when nothing is positive."""
    if not probs.any():
        return NO_TOKEN
    return _locate(probs, u)


def _keep(row: Row, largest: float, filters: Filters) -> _Kept:
    ids = _top_k(row, filters.top_k) if 0 < filters.top_k < len(row) else None
    weights = _softmax_weights(row if ids is None else row[ids], largest, filters.temperature)
    if filters.top_p < 1.0:
        index = _top_p(weights, filters.top_p)
        ids, weights = index if ids is None else ids[index], weights[index]
    if filters.min_p > 0.0:
        index = np.flatnonzero(weights >= filters.min_p)
        ids, weights = index if ids is None else ids[index], weights[index]
    return _Kept(ids, weights)


def _softmax_weights(logits: Row, largest: float, temperature: float) -> Weights:
    weights = np.subtract(logits, largest, dtype=np.float64)
    if temperature != 1.0:
        with np.errstate(over="ignore"):  # a tiny temperature takes all but the largest to -inf, as it should
            weights /= temperature
    return np.exp(weights, out=weights)


def _top_k(row: Row, k: int) -> Ids:
    """The ids of the k largest logits, ascending; k < V."""
    candidates = _candidates(row, k)
    values = row[candidates]
    last = np.partition(values, len(values) - k)[len(values) - k]
    chosen = values > last
    ties = np.flatnonzero(values == last)
    chosen[ties[: k - int(chosen.sum())]] = True
    return candidates[chosen]


def _candidates(row: Row, count: int) -> Ids:
    """Ids, ascending, that hold the `count` largest logits and few others.

    The maxima of disjoint groups are logits of the row, so the count-th largest of them is at most the count-th
    largest of all: nothing below it is needed. One pass instead of a selection over the vocabulary.
    """
    num_groups = max(len(row) // _MAX_GROUP, 2 * count)
    group = len(row) // num_groups
    if group < 2:
        return np.flatnonzero(row >= np.partition(row, len(row) - count)[len(row) - count])
    # Rows of strided groups, so that the maximum is taken over whole vectors.
    maxima = row[: group * num_groups].reshape(group, num_groups).max(axis=0)
    return np.flatnonzero(row >= np.partition(maxima, num_groups - count)[num_groups - count])


def _top_p(weights: Weights, top_p: float) -> Ids:
    """Indices, ascending, of the smallest set of largest weights that reaches `top_p` of their sum."""
    total = float(weights.sum())
    target = top_p * total
    # The weights below this sum to less than (1 - top_p) * total: what is kept lies above. Half of it, for rounding.
    candidates = np.flatnonzero(weights >= 0.5 * (1.0 - top_p) * total / len(weights))
    values = weights[candidates]
    falling, before = _around_mass(values, target)
    sums = before + np.cumsum(falling)
    last_index = min(int(np.searchsorted(sums, target)), len(falling) - 1)
    last = float(falling[last_index])
    num_ties = int((falling[: last_index + 1] == last).sum())
    chosen = values > last
    chosen[np.flatnonzero(values == last)[:num_ties]] = True
    return candidates[chosen]


def _around_mass(weights: Weights, target: float) -> tuple[Weights, float]:
    """The run of `weights` in falling order within which their running sum reaches `target`, and the sum before it.

    A flat distribution leaves most of the vocabulary; a histogram over 64ths of an octave (the leading bits of the
    positive float64 numbers) then leaves little to sort.
    """
    if len(weights) <= _SORT_LIMIT:
        return np.sort(weights)[::-1], 0.0
    bins = weights.view(np.int64) >> _BIN_SHIFT
    bins -= bins.min()
    ends = np.cumsum(np.bincount(bins, weights=weights)[::-1])
    place = min(int(np.searchsorted(ends, target)), len(ends) - 1)
    inside = weights[bins == len(ends) - 1 - place]
    return np.sort(inside)[::-1], float(ends[place - 1]) if place else 0.0


def _locate(weights: Weights, u: float) -> int:
    """The first index with a positive weight whose running sum exceeds u * total; some weight is positive.

    Where rounding leaves none, the last positive one.
    """
    whole = len(weights) // _SUM_BLOCK
    sums = weights[: whole * _SUM_BLOCK].reshape(whole, _SUM_BLOCK).sum(axis=1)
    ends = np.cumsum(np.append(sums, weights[whole * _SUM_BLOCK :].sum()))
    mark = u * float(ends[-1])
    block = min(int(np.searchsorted(ends, mark, side="right")), whole)
    start = block * _SUM_BLOCK
    running = (ends[block - 1] if block else 0.0) + np.cumsum(weights[start : start + _SUM_BLOCK])
    offset = int(np.searchsorted(running, mark, side="right"))
    return start + offset if offset < len(running) else int(np.flatnonzero(weights[: start + _SUM_BLOCK])[-1])
