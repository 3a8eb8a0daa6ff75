"""y = x Wᵀ + b with weights laid out once for the CPU at hand.

oneDNN can keep a bf16 weight in the blocked order that its kernels read, which saves it from reordering or from reading
badly at every call; where it cannot (no oneDNN, no fast bf16, another device or type) the plain operator serves.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

# The row count that packing is tuned for. On AVX-512 with bf16, 8 rows are as fast packed for 1 as packed for 8.
PACK_ROWS = 1


class Linear:
    """A weight [out, in] and an optional bias [out], ready to multiply rows [T, in]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        self.is_packed = can_pack(weight)
        if self.is_packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        else:
            self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out] in x's dtype."""
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return linear(x, self.weight, self.bias)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN packs this weight: in bf16, on a CPU that multiplies bf16."""
    if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


TILE = 32


def pack_tiles(weight: torch.Tensor) -> torch.Tensor:
    """A weight [n, k], k even, in the C kernels' order: tiles of 32 outputs, n padded with zeros (linear.h).

    bf16: [tiles, k / 2, 32, 2]; fp32: [tiles, k, 32].
    """
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -n % TILE))
    tiles = padded.view(-1, TILE, k)
    if weight.dtype is torch.bfloat16:
        return tiles.view(-1, TILE, k // 2, 2).transpose(1, 2).contiguous()
    return tiles.transpose(1, 2).contiguous()


def interleave_gates(gate_up: torch.Tensor) -> torch.Tensor:
    """Gate rows above up rows [2 ffn, k] -> 16 gates, their 16 ups, and so on: a tile holds both of each."""
    gate, up = gate_up.chunk(2)
    k = gate.shape[1]
    return torch.stack([gate.reshape(-1, TILE // 2, k), up.reshape(-1, TILE // 2, k)], dim=1).reshape(-1, k)
