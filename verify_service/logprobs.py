"""Log-probabilities of emitted and prompt tokens.

They are those of the logits after penalties and bias, before temperature and filters.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.v1 import verify_pb2

Row = NDArray[np.float32]


def token_logprob(row: Row, token: int, num_top: int) -> verify_pb2.TokenLogprob:
    """ln p of `token` in logits float32 [V], and the `num_top` likeliest tokens, ties to the lowest id."""
    shifted = row.astype(np.float64) - float(row.max())
    total = float(np.log(np.exp(shifted).sum()))
    top = [verify_pb2.TopLogprob(token=best, logprob=float(shifted[best]) - total) for best in _top(row, num_top)]
    return verify_pb2.TokenLogprob(token=token, logprob=float(shifted[token]) - total, top=top)


def _top(row: Row, count: int) -> list[int]:
    if count == 0:
        return []
    least = np.partition(row, len(row) - count)[len(row) - count]
    candidates = np.flatnonzero(row >= least)
    return candidates[np.argsort(-row[candidates], kind="stable")[:count]].tolist()
