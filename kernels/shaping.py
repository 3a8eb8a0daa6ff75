"""Penalties, bias and grammar masks for rows of logits on a device: kernels.penalties there, with the same numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels.penalties import RowEdits
from kernels.transfer import to_device

# Rows whose mask is spread out from bits at a time: one byte for each token of the vocabulary, and more on the way.
_MASKED_AT_ONCE = 64


def apply_edits(logits: torch.Tensor, rows: npt.NDArray[np.int64], edits: Sequence[RowEdits]) -> None:
    """Shapes rows `rows` (distinct) of logits float32 [.., V] in place, one by each of `edits`."""
    device = logits.device
    at, ids = _places(rows, [edit.ids for edit in edits])
    if len(ids):
        counts = [len(edit.ids) for edit in edits]
        factor = to_device(np.repeat(np.array([e.repetition for e in edits], np.float32), counts), device)
        penalty = to_device(np.concatenate([edit.penalties for edit in edits]), device)
        where = (to_device(at, device), to_device(ids, device))
        values = logits[where]
        logits[where] = torch.where(values < 0, values * factor, values / factor) - penalty
    at, ids = _places(rows, [edit.bias_ids for edit in edits])
    if len(ids):
        bias = to_device(np.concatenate([edit.bias_values for edit in edits]), device)
        where = (to_device(at, device), to_device(ids, device))
        logits[where] = logits[where] + bias
    at, ids = _places(rows, [edit.forbidden for edit in edits])
    if len(ids):
        forbidden = torch.full((len(ids),), -torch.inf, device=device)
        logits[to_device(at, device), to_device(ids, device)] = forbidden


def apply_bitmasks(logits: torch.Tensor, rows: npt.NDArray[np.int64], masks: npt.NDArray[np.int32]) -> None:
    """Sets to -inf, in rows `rows` (distinct) of logits float32 [.., V], the tokens whose bit is 0.

    masks int32 [len(rows), ceil(V / 32)]: token t is bit t % 32 of word t // 32.
    """
    device, vocab = logits.device, logits.shape[1]
    at, words = to_device(rows, device), to_device(masks, device)
    bits = torch.arange(32, dtype=torch.int32, device=device)
    for first in range(0, len(rows), _MASKED_AT_ONCE):
        part = slice(first, first + _MASKED_AT_ONCE)
        spread = ((words[part, :, None] >> bits) & 1).flatten(1)[:, :vocab]
        shaped = logits.index_select(0, at[part]).masked_fill_(spread == 0, -torch.inf)
        logits.index_copy_(0, at[part], shaped)


def _places(
    rows: npt.NDArray[np.int64], ids: list[npt.NDArray[np.int64]]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows and ids of all entries."""
    return np.repeat(rows, [len(each) for each in ids]), np.concatenate([np.empty(0, np.int64), *ids])
