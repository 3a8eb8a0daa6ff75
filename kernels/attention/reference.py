"""Tree attention over a paged pool, as plainly as it can be said: the oracle for every other kernel."""

from __future__ import annotations

import torch

from kernels.attention.layout import AttentionLayout
from kernels.attention.pool import load


def attention(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, layout: AttentionLayout, scale: float, *,
    soft_cap: float = 0.0, window: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Softmax attention of every row over the keys it sees, in fp32.

    q [T, heads, head_dim]; k_pool, v_pool [slots, kv_heads, head_dim], the rows' own keys already written; head h reads
    kv head h // (heads // kv_heads). Returns [T, heads, head_dim] in q's dtype.
    soft_cap c > 0 bends scores to c * tanh(score / c) (Gemma 2). window w > 0 hides keys that lie w or more positions
    back (Mistral's sliding window: a row sees itself and w - 1 before it); positions, so that in a tree it goes by
    depth. Rows of q beyond the layout's, which pad a step, give zeros.
    """
    out = torch.zeros_like(q)
    group = q.shape[1] // k_pool.shape[1]
    for segment in layout.plan(q.device):
        keys = load(k_pool, segment.slots, q.dtype).float().repeat_interleave(group, dim=1)
        values = load(v_pool, segment.slots, q.dtype).float().repeat_interleave(group, dim=1)
        scores = torch.einsum("ihd,jhd->hij", q[segment.rows].float(), keys) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        weights = scores.masked_fill(~segment.seen(window), -torch.inf).softmax(dim=-1)
        out[segment.rows] = torch.einsum("hij,jhd->ihd", weights, values).to(q.dtype)
    return out
