"""Log-probabilities of chosen tokens, and the likeliest ones, for rows of logits on their own device."""

from __future__ import annotations

from typing import NamedTuple

import torch

# Rows in float64, sorted where likeliest tokens are wanted, go so many at a time.
_ROWS_AT_ONCE = 64


class TokenLogprobs(NamedTuple):
    """Log probabilities of R rows; K likeliest tokens by falling probability, ties to the lowest id."""

    logprobs: torch.Tensor
    """float64 [R]"""
    top_ids: torch.Tensor
    """int64 [R, K]"""
    top_logprobs: torch.Tensor
    """float64 [R, K]"""


def token_logprobs(logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, num_top: int) -> TokenLogprobs:
    """ln p of tokens (int64 [R]) in rows (int64 [R], at least one) of logits float32 [.., V]; nothing is read back."""
    parts = [
        _some(
            logits.index_select(0, rows[first : first + _ROWS_AT_ONCE]), tokens[first : first + _ROWS_AT_ONCE], num_top
        )
        for first in range(0, len(rows), _ROWS_AT_ONCE)
    ]
    return TokenLogprobs(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _some(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> TokenLogprobs:
    shifted = logits.double() - logits.amax(dim=1, keepdim=True).double()
    shifted -= shifted.exp().sum(dim=1, keepdim=True).log()
    # torch.topk promises no order among equal ones.
    top = logits.sort(dim=1, descending=True, stable=True).indices[:, :num_top] if num_top else tokens.new_zeros(0)
    top = top.view(len(logits), -1)
    return TokenLogprobs(shifted.gather(1, tokens[:, None])[:, 0], top, shifted.gather(1, top))
