"""kernels.sampling for many rows at once, in torch's operators on the rows' own device; nothing is read back.

Same rule and same ties, and in float64 the same numbers to within the rounding of sums, whose order differs: a token
can differ only where u or a filter's bound lies within some 1e-15 of another choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kernels.sampling import NO_TOKEN, Filters
from kernels.transfer import to_device

# Sorting 128k logits takes some 4 MB a row; more rows than this go one batch behind another.
_ROWS_AT_ONCE = 64


class RowFilters(NamedTuple):
    """The filters of R rows."""

    temperature: torch.Tensor
    """float64 [R]; 0: greedy."""
    top_k: torch.Tensor
    """int64 [R]; 0: all; 1 is greedy, whatever the temperature."""
    top_p: torch.Tensor
    """float64 [R]."""
    min_p: torch.Tensor
    """float64 [R]."""
    is_sorted: bool
    """Whether some row has a top-k or top-p."""

    @classmethod
    def of(cls, filters: Sequence[Filters], device: torch.device) -> RowFilters:
        """Sent to the device without waiting for it."""
        is_sorted = any((item.top_k > 0 or item.top_p < 1.0) and not item.is_greedy for item in filters)
        return cls(
            to_device(np.array([0.0 if item.is_greedy else item.temperature for item in filters]), device),
            to_device(np.array([item.top_k for item in filters], np.int64), device),
            to_device(np.array([item.top_p for item in filters]), device),
            to_device(np.array([item.min_p for item in filters]), device),
            is_sorted,
        )

    def rows(self, chosen: slice | torch.Tensor) -> RowFilters:
        """The filters of some rows."""
        return RowFilters(
            self.temperature[chosen], self.top_k[chosen], self.top_p[chosen], self.min_p[chosen], self.is_sorted
        )


def draw_rows(logits: torch.Tensor, rows: torch.Tensor, filters: RowFilters, u: torch.Tensor) -> torch.Tensor:
    """Tokens int64 [R] of `rows` (int64 [R]) of logits float32 [.., V], for u float64 [R] in [0, 1).

    -1 where a row has no distribution.
    """
    drawn = [
        _draw(logits.index_select(0, rows[part]), filters.rows(part), u[part])
        for part in (slice(first, first + _ROWS_AT_ONCE) for first in range(0, len(rows), _ROWS_AT_ONCE))
    ]
    return torch.cat(drawn) if drawn else rows.new_zeros(0)


def filtered_probs_rows(logits: torch.Tensor, filters: RowFilters) -> torch.Tensor:
    """The distributions of logits float32 [R, V] that `draw_rows` draws from: float64 [R, V], zeros where none is."""
    weights, _, is_there = _weights(logits, filters)
    return torch.where(is_there[:, None], weights / weights.sum(dim=1, keepdim=True), 0.0)


def _draw(logits: torch.Tensor, filters: RowFilters, u: torch.Tensor) -> torch.Tensor:
    weights, best, is_there = _weights(logits, filters)
    sums = weights.cumsum(dim=1)
    found = torch.searchsorted(sums, (u * sums[:, -1])[:, None], right=True)[:, 0]
    # Where rounding leaves no sum above the mark: the last positive one.
    ids = torch.arange(logits.shape[1], device=logits.device)
    last = torch.where(weights > 0.0, ids, 0).amax(dim=1)
    tokens = torch.where(filters.temperature == 0.0, best, torch.minimum(found, last))
    return torch.where(is_there, tokens, NO_TOKEN)


def _weights(logits: torch.Tensor, filters: RowFilters) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Kept weights float64 [R, V] (greedy: one-hot), the largest logit's id int64 [R], and whether there are any."""
    best = logits.argmax(dim=1)
    largest = logits.gather(1, best[:, None])
    greedy = (filters.temperature == 0.0)[:, None]
    heat = torch.where(greedy, 1.0, filters.temperature[:, None])
    weights = ((logits.double() - largest.double()) / heat).exp()
    if filters.is_sorted:
        weights = _top(logits, weights, filters)
    weights = torch.where(weights >= filters.min_p[:, None], weights, 0.0)
    one_hot = torch.zeros_like(weights).scatter_(1, best[:, None], 1.0)
    return torch.where(greedy, one_hot, weights), best, largest[:, 0].isfinite()


def _top(logits: torch.Tensor, weights: torch.Tensor, filters: RowFilters) -> torch.Tensor:
    """Weights without those that top-k and then top-p drop."""
    order = logits.sort(dim=1, descending=True, stable=True).indices
    falling = weights.gather(1, order)
    limit = torch.where(filters.top_k == 0, logits.shape[1], filters.top_k)
    falling = falling * (torch.arange(logits.shape[1], device=logits.device) < limit[:, None])
    sums = falling.cumsum(dim=1)
    before = torch.nn.functional.pad(sums[:, :-1], (1, 0))
    reached = before >= filters.top_p[:, None] * sums[:, -1:]
    falling = falling.masked_fill(reached & (filters.top_p < 1.0)[:, None], 0.0)
    return torch.zeros_like(weights).scatter_(1, order, falling)
