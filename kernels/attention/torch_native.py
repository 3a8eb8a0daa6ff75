"""Tree attention by torch's own fused operator: any device, no compiler needed; same signature as the reference."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.layout import AttentionLayout
from kernels.attention.pool import load


def attention(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, layout: AttentionLayout, scale: float, *,
    soft_cap: float = 0.0, window: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Computes kernels.attention.reference.attention; the keys of each segment are gathered."""
    # Whatever lay in rows of padding must not reach the next layer: it could be NaN.
    out = (torch.empty_like if len(q) == len(layout.slots) else torch.zeros_like)(q)
    attend = _fused if not soft_cap else _bent
    for segment in layout.plan(q.device):
        keys = load(k_pool, segment.slots, q.dtype).transpose(0, 1)
        values = load(v_pool, segment.slots, q.dtype).transpose(0, 1)
        rows = q[segment.rows].transpose(0, 1)
        # One row sees everything that is gathered for it: no mask, and the operator's fastest way.
        mask = None if len(segment.visible) == 1 and not window else segment.seen(window)
        out[segment.rows] = attend(rows, keys, values, mask, scale, soft_cap).transpose(0, 1)
    return out


def _fused(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float, _cap: float
) -> torch.Tensor:
    """rows [heads, n, d], keys and values [kv_heads, m, d], mask bool [n, m] or None -> [heads, n, d]."""
    blocked = None if mask is None else mask[None]
    seen = scaled_dot_product_attention(
        rows[None], keys[None], values[None], attn_mask=blocked, scale=scale, enable_gqa=True
    )
    return seen[0]


def _bent(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float, cap: float
) -> torch.Tensor:
    """Computes what _fused does for capped scores, which torch's operator does not know; in fp32."""
    num_kv_heads, group = len(keys), len(rows) // len(keys)
    grouped = rows.reshape(num_kv_heads, group * rows.shape[1], rows.shape[2]).float()
    scores = cap * torch.tanh(grouped @ keys.float().transpose(1, 2) * (scale / cap))
    scores = scores.view(len(rows), rows.shape[1], -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = scores.softmax(dim=-1).reshape(num_kv_heads, group * rows.shape[1], -1)
    return (weights @ values.float()).view(rows.shape).to(rows.dtype)
