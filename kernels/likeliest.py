"""The likeliest tokens of rows of logits, and how likely they are: what a drafter makes of a step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from kernels.dispatch import has_triton

Likeliest = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""Logits [R, V] and a number k >= 1 -> probabilities fp32 [R, min(k, V)], falling, and ids int64, of equally
likely ones the lower first. Probabilities are those of a softmax over V."""


def likeliest(logits: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See Likeliest, on any device; torch's operators do not promise the order of equals beyond the first.

    Triton's kernels find them, where they serve.
    """
    if has_triton(logits.device) and not logits.requires_grad:
        from kernels import likeliest_triton

        if likeliest_triton.takes(logits.shape[1], num_top):
            return likeliest_triton.likeliest(logits, num_top)
    logits = logits.float()
    if num_top == 1:
        values, ids = (found[:, None] for found in logits.max(dim=-1))
    else:
        values, ids = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    return (values - logits.logsumexp(dim=-1, keepdim=True)).exp(), ids


def native_likeliest(library: ctypes.CDLL) -> Likeliest:
    """See Likeliest, by the C kernel on the calling thread: one pass over each row."""

    def find(logits: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
        wide = logits.float()
        rows = wide if wide.stride(1) == 1 else wide.contiguous()
        shape = (len(rows), min(num_top, rows.shape[1]))
        probabilities, ids = torch.empty(shape), torch.empty(shape, dtype=torch.int32)
        library.outrider_likeliest(
            rows.data_ptr(), rows.stride(0), len(rows), rows.shape[1], shape[1], probabilities.data_ptr(),
            ids.data_ptr(),
        )  # fmt: skip
        return probabilities, ids.long()

    return find
