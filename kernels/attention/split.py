"""Attention by two backends: one for chunks of prompts, one for single rows, and either of them for trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention.layout import AttentionLayout
from kernels.transfer import to_device

Kernel = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Part:
    """The segments of a step that one backend serves; rows None: all of them."""

    kernel: Kernel
    layout: AttentionLayout
    rows: torch.Tensor | None


class SplitAttention:
    """Same signature as the reference. `trees_with_decode`: trees go to the second backend."""

    def __init__(self, prefill: Kernel, decode: Kernel, *, trees_with_decode: bool) -> None:
        self._prefill = prefill
        self._decode = decode
        self._trees_with_decode = trees_with_decode
        self._layout: AttentionLayout | None = None
        self._parts: list[_Part] = []

    def __call__(
        self, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, layout: AttentionLayout, scale: float, *,
        soft_cap: float = 0.0, window: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        """Computes kernels.attention.reference.attention; which segment goes where is worked out once per step."""
        if layout is not self._layout:
            self._layout, self._parts = layout, self._split(layout, q.device)
        out = torch.zeros_like(q)
        for part in self._parts:
            rows = q if part.rows is None else q[part.rows]
            seen = part.kernel(rows, k_pool, v_pool, part.layout, scale, soft_cap=soft_cap, window=window)
            if part.rows is None:
                return seen
            out[part.rows] = seen
        return out

    def _split(self, layout: AttentionLayout, device: torch.device) -> list[_Part]:
        decodes = layout.num_rows == 1
        if self._trees_with_decode:
            decodes = decodes | (layout.mask_starts >= 0)
        if decodes.all() or not decodes.any():
            return [_Part(self._decode if decodes.all() else self._prefill, layout, None)]
        parts = []
        for kernel, members in ((self._prefill, ~decodes), (self._decode, decodes)):
            part, rows = layout.selected(np.flatnonzero(members))
            parts.append(_Part(kernel, part, to_device(rows, device)))
        return parts
