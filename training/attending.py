"""Attention of a head in training: over a conversation's own rows, and over unrolled rows below each of them.

In service a head has its rows from the target's states in its cache, and drafts below the newest: each drafted row
sees the cache up to its root and the drafted rows above it. Training does so below every row at once (EAGLE-3's
training-time test): row r's branch at depth s sees rows 0..r of depth 0, and its own rows of depths 1..s. Where a
layer has a window w, none of them lies w or more positions back, by depth in a branch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.rope import apply_rope


class RootRows:
    """`attend` for the rows of depth 0: causal within each of B conversations of L rows. Keeps keys and values.

    windows: of each layer, as ModelConfig has them.
    """

    def __init__(self, batch_size: int, num_layers: int, windows: Sequence[int]) -> None:
        self.batch_size = batch_size
        self.windows = windows or (0,) * num_layers
        self.keys: list[torch.Tensor] = [torch.empty(0)] * num_layers
        self.values: list[torch.Tensor] = [torch.empty(0)] * num_layers

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """See base.Attend; rows are [B * L]."""
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        q, k, v = (x.unflatten(0, (self.batch_size, -1)).transpose(1, 2) for x in (q, k, v))  # [B, heads, L, d]
        self.keys[layer], self.values[layer] = k, v
        window, length = self.windows[layer], q.shape[2]
        seen = _seen(torch.arange(length, device=q.device), length, window) if 0 < window < length else None
        is_shared = q.shape[1] != k.shape[1]
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=is_shared)
        return mixed.transpose(1, 2).flatten(0, 1)


class Branches:
    """Rows drafted below roots: `width` of them below each of `roots`, one depth after another.

    roots: int64 [R], the row of depth 0 that each root is, in every conversation alike.
    """

    def __init__(self, below: RootRows, roots: torch.Tensor, width: int = 1) -> None:
        self.below = below
        self.roots = roots
        self.width = width
        num_layers = len(below.keys)
        self._keys: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]
        self._values: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]

    def reorder(self, parents: torch.Tensor) -> None:
        """Goes on from other branches: `parents` int64 [B, R, width] names the branch that each new row is below."""
        for kept in (*self._keys, *self._values):
            for depth, rows in enumerate(kept):
                index = parents[:, None, :, :, None].expand(-1, rows.shape[1], -1, -1, rows.shape[-1])
                kept[depth] = rows.gather(3, index)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """See base.Attend; rows are [B * R * width], the next depth of every branch."""
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        batch, groups = self.below.batch_size, q.shape[1] // k.shape[1]
        q, k, v = (self._grid(x, batch) for x in (q, k, v))  # [B, heads, R, width, d]
        self._keys[layer].append(k)
        self._values[layer].append(v)
        root_keys, root_values = self.below.keys[layer], self.below.values[layer]
        root_keys, root_values = _spread(root_keys, groups), _spread(root_values, groups)
        scale = q.shape[-1] ** -0.5
        window, depth = self.below.windows[layer], len(self._keys[layer])
        visible = _seen(self.roots, root_keys.shape[2], max(window - depth, 0) if window else None)
        flat = q.flatten(2, 3)
        past = (flat @ root_keys.transpose(2, 3)).unflatten(2, q.shape[2:4]).float() * scale
        past = past.masked_fill(~visible[:, None], -torch.inf)  # [B, heads, R, width, L]
        own_keys, own_values = self._keys[layer][-window:], self._values[layer][-window:]  # all without a window
        own = torch.stack([(q * _spread(rows, groups)).sum(-1) for rows in own_keys], dim=-1).float() * scale
        weights = torch.cat([past, own], dim=-1).softmax(dim=-1).to(q.dtype)
        past_weights, own_weights = weights.split([past.shape[-1], own.shape[-1]], dim=-1)
        mixed = (past_weights.flatten(2, 3) @ root_values).unflatten(2, q.shape[2:4])
        mixed = mixed + _mixed(own_weights, [_spread(rows, groups) for rows in own_values])
        return mixed.permute(0, 2, 3, 1, 4).flatten(0, 2)

    def _grid(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        return x.unflatten(0, (batch, len(self.roots), self.width)).permute(0, 3, 1, 2, 4)


def _seen(roots: torch.Tensor, num_rows: int, reach: int | None) -> torch.Tensor:
    """bool [R, num_rows]: rows up to each of `roots`, int64 [R], that lie less than `reach` back; None: all of them."""
    back = roots[:, None] - torch.arange(num_rows, device=roots.device)
    return back >= 0 if reach is None else (back >= 0) & (back < reach)


def _mixed(weights: torch.Tensor, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum over depths of weights [..., depths] times values, each [..., d]."""
    parts = [weights[..., depth, None] * rows for depth, rows in enumerate(values)]
    return torch.stack(parts).sum(dim=0)


def _spread(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Key heads [B, kv heads, ...] repeated for the query heads that share them."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)
