"""Linear layers over quantised weights in torch's own operators: any device, no packing.

On a CPU the C kernels are the fast path for whole models; these serve draft heads, other families, and GPUs.
"""

from __future__ import annotations

import torch

from kernels.quantize import GROUP, quantize_int4, quantize_int8

# torch._int_mm on CUDA takes no fewer rows, and only multiples of 8 of everything.
_MIN_ROWS, _STEP = 32, 8


class Int8Linear:
    """int8 weights, activations as they are."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.codes, scales = quantize_int8(weight)
        self.scales = scales
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out] in x's dtype."""
        y = torch.nn.functional.linear(x, self.codes.to(x.dtype)) * self.scales.to(x.dtype)
        return y if self.bias is None else y + self.bias


class Int8DynamicLinear:
    """int8 weights; each row of activations is rounded to int8 with a scale of its own."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        codes, self.scales = quantize_int8(weight)
        self.num_outputs, self.num_inputs = codes.shape
        pads = (0, -self.num_inputs % _STEP, 0, -self.num_outputs % _STEP)
        self.codes = torch.nn.functional.pad(codes, pads)
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out] in x's dtype."""
        rows = x.float()
        scales = rows.abs().amax(dim=1, keepdim=True) / 127
        coded = (rows / scales.clamp_min(torch.finfo(torch.float32).tiny)).round().to(torch.int8)
        num_rows = max(_MIN_ROWS, len(x) + -len(x) % _STEP) if x.is_cuda else len(x)
        coded = torch.nn.functional.pad(coded, (0, -self.num_inputs % _STEP, 0, num_rows - len(x)))
        sums = torch.ops.aten._int_mm(coded, self.codes.T)[: len(x), : self.num_outputs]
        y = (sums.float() * self.scales * scales).to(x.dtype)
        return y if self.bias is None else y + self.bias


class Int4Linear:
    """4-bit weights in groups of 32, two to a byte; activations as they are."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        nibbles, steps, lows = quantize_int4(weight)
        self.num_inputs = weight.shape[1]
        padded = torch.nn.functional.pad(nibbles, (0, -self.num_inputs % GROUP))
        self.pairs = padded[:, ::2] | padded[:, 1::2] << 4
        self.steps, self.lows = steps[:, :, None], lows[:, :, None]
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out] in x's dtype."""
        nibbles = torch.stack([self.pairs & 15, self.pairs >> 4], dim=-1).view(*self.steps.shape[:2], GROUP)
        values = torch.addcmul(self.lows.to(x.dtype), nibbles.to(x.dtype), self.steps.to(x.dtype))
        return torch.nn.functional.linear(x, values.view(len(values), -1)[:, : self.num_inputs], self.bias)


class Float8Linear:
    """fp8 (e4m3) weights with a scale per output, activations rounded to fp8 with a scale per row; CUDA only."""

    _LARGEST = torch.finfo(torch.float8_e4m3fn).max

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.scales = self._narrow(weight)
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out] in x's dtype."""
        rows, scales = self._narrow(x)
        # The kernel with a scale per row gives bf16 only.
        y = torch.ops.aten._scaled_mm(rows, self.weight.T, scales, self.scales.T, out_dtype=torch.bfloat16).to(x.dtype)
        return y if self.bias is None else y + self.bias

    @classmethod
    def _narrow(cls, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = values.float()
        scales = wide.abs().amax(dim=1, keepdim=True) / cls._LARGEST
        scales = scales.clamp_min(torch.finfo(torch.float32).tiny)
        return (wide / scales).to(torch.float8_e4m3fn), scales
