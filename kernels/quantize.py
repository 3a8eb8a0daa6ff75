"""Quantised weights: the codes that stand for them, what they come to, and the order in which the C kernels read them.

int8: a scale per output, codes -127 to 127. int4: a step and a low per output and 32 inputs, codes 0 to 15; that is
also the grid of GGUF's Q4_1, so a model that was converted from it loses next to nothing. Both round to nearest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

GROUP = 32
MAX_FEW_ROWS = 64
"""More rows are better off with weights widened first, on a GPU."""
TILE = 32
# The C kernels' formats of quantised matrices, by the method's name (linear.h).
FORMATS = {"int8": 2, "int8_dynamic": 3, "int4": 4}


class Int8Weight(NamedTuple):
    """codes int8 [n, k]; scales fp32 [n]: weight = scale * code."""

    codes: torch.Tensor
    scales: torch.Tensor

    def values(self) -> torch.Tensor:
        """The weights that it stands for, fp32 [n, k]; for tests."""
        return self.codes.float() * self.scales[:, None]


class Int4Weight(NamedTuple):
    """nibbles uint8 [n, k]; steps, lows bf16 [n, groups]: weight = low + step * nibble. The last group may be short."""

    nibbles: torch.Tensor
    steps: torch.Tensor
    lows: torch.Tensor

    def values(self) -> torch.Tensor:
        """The weights that it stands for, fp32 [n, k]; for tests."""
        k = self.nibbles.shape[1]
        steps, lows = (part.float().repeat_interleave(GROUP, dim=1)[:, :k] for part in (self.steps, self.lows))
        return self.nibbles.float() * steps + lows


def quantize_int8(weight: torch.Tensor) -> Int8Weight:
    """A weight [n, k] with a scale for each output; a row of zeros gets scale 0."""
    weight = weight.float()
    scales = weight.abs().amax(dim=1) / 127
    codes = (weight / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round().clamp(-127, 127)
    return Int8Weight(codes.to(torch.int8), scales)


def quantize_int4(weight: torch.Tensor) -> Int4Weight:
    """A weight [n, k] with a step and a low for each output and GROUP inputs, which span the group's numbers."""
    n, k = weight.shape
    # The last group's end is filled with its own last number, which moves neither of its bounds.
    groups = pad(weight.float()[None], (0, -k % GROUP), mode="replicate")[0].view(n, -1, GROUP)
    lows = groups.amin(dim=2).bfloat16()
    steps = ((groups.amax(dim=2) - lows.float()) / 15).bfloat16()
    divisors = steps.float().clamp_min(torch.finfo(torch.float32).tiny)[:, :, None]
    nibbles = ((groups - lows.float()[:, :, None]) / divisors).round().clamp(0, 15)
    return Int4Weight(nibbles.to(torch.uint8).view(n, -1)[:, :k], steps, lows)


def pack_quantized(weight: torch.Tensor, method: str) -> torch.Tensor:
    """A weight [n, k] quantised and laid out for the C kernels; bytes."""
    if method == "int4":
        return pack_int4(quantize_int4(weight))
    return (pack_int8 if method == "int8" else pack_int8_dynamic)(quantize_int8(weight))


def pack_int8(weight: Int8Weight) -> torch.Tensor:
    """Lays weights out for the C kernels' INT8 (quantized.h): bytes [tiles, ...]."""
    codes, scales = _tiles(weight.codes), _headers(weight.scales)
    return torch.cat([scales, _in_runs(codes, 2)], dim=1)


def pack_int8_dynamic(weight: Int8Weight) -> torch.Tensor:
    """Lays weights out for the C kernels' INT8_DYNAMIC (quantized.h): bytes [tiles, ...]."""
    codes, scales = _tiles(weight.codes), _headers(weight.scales)
    corrections = codes.sum(dim=2, dtype=torch.int32) * -128
    return torch.cat([scales, corrections.view(torch.uint8), _in_runs(codes, 4)], dim=1)


def pack_int4(weight: Int4Weight) -> torch.Tensor:
    """Lays weights out for the C kernels' INT4 (quantized.h): bytes [tiles, groups, 640]."""
    tiles = _tiles(weight.nibbles)
    count, groups = len(tiles), tiles.shape[2] // GROUP
    low, high = tiles.view(count, 2, TILE // 2, -1).unbind(1)
    # Four inputs of an output are a word of 32 bits; its two middle bytes change places.
    words = (low | high << 4).view(torch.int32)
    words = (words & -0xFFFF01) | (words >> 8 & 0xFF00) | (words & 0xFF00) << 8
    body = words.view(count, TILE // 2, groups, -1).permute(0, 2, 3, 1).reshape(count, groups, -1).view(torch.uint8)
    rows = -len(weight.steps) % TILE
    parts = [pad(part, (0, 0, 0, rows)).view(count, TILE, groups) for part in (weight.steps, weight.lows)]
    header = torch.cat([part.transpose(1, 2) for part in parts], dim=2).contiguous()
    return torch.cat([header.view(torch.uint8), body], dim=2)


def _tiles(codes: torch.Tensor) -> torch.Tensor:
    """Codes [n, k] as [tiles, 32, k], n and k padded with zeros."""
    n, k = codes.shape
    return pad(codes, (0, -k % GROUP, 0, -n % TILE)).view(-1, TILE, k + -k % GROUP)


def _headers(scales: torch.Tensor) -> torch.Tensor:
    return pad(scales, (0, -len(scales) % TILE)).view(-1, TILE).contiguous().view(torch.uint8)


def _in_runs(tiles: torch.Tensor, run: int) -> torch.Tensor:
    """Tiles [tiles, 32, k] with `run` inputs of one output beside each other, then the outputs: bytes [tiles, ...]."""
    unit = {2: torch.int16, 4: torch.int32}[run]
    return tiles.view(unit).transpose(1, 2).contiguous().view(torch.uint8).view(len(tiles), -1)
