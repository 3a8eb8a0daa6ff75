"""Tree attention over a paged pool, as plainly as it can be said: the oracle for every other kernel."""

from __future__ import annotations

import torch

from kernels.attention.layout import AttentionLayout


def attention(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, layout: AttentionLayout, scale: float
) -> torch.Tensor:
    """Softmax attention of every row over the keys it sees, in fp32.

    q [T, heads, head_dim]; k_pool, v_pool [slots, kv_heads, head_dim], the rows' own keys already written; head h reads
    kv head h // (heads // kv_heads). Returns [T, heads, head_dim] in q's dtype.
    """
    out = torch.empty_like(q)
    group = q.shape[1] // k_pool.shape[1]
    for segment in layout.plan(q.device):
        keys = k_pool[segment.slots].float().repeat_interleave(group, dim=1)
        values = v_pool[segment.slots].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("ihd,jhd->hij", q[segment.rows].float(), keys) * scale
        weights = scores.masked_fill(~segment.visible, -torch.inf).softmax(dim=-1)
        out[segment.rows] = torch.einsum("hij,jhd->ihd", weights, values).to(q.dtype)
    return out
