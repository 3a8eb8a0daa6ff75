"""Linear layers over quantised weights in torch's own operators: any device, no packing.

They serve where the C kernels do not: on CPUs without a compiler, and on GPUs, where a few rows at a time go through
kernels.quantized_triton.
"""

from __future__ import annotations

from types import ModuleType

import torch

from kernels.dispatch import has_triton
from kernels.quantize import GROUP, quantize_int4, quantize_int8

# torch._int_mm on CUDA takes no fewer rows, and only multiples of 8 of everything.
_MIN_ROWS, _STEP = 32, 8


def _fused(weight: torch.Tensor) -> ModuleType | None:
    """The kernels that widen weights within the product, where there are any."""
    if not has_triton(weight.device):
        return None
    from kernels import quantized_triton

    return quantized_triton


class Int8Linear:
    """int8 weights, activations as they are."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.codes, self.scales = quantize_int8(weight)
        self.bias = bias
        self._fused = _fused(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out] in x's dtype."""
        if self._fused is not None and self._fused.takes(x):
            y = self._fused.int8_product(x, self.codes, self.scales)
        elif x.dtype == torch.float16:  # whose range ends before sums of codes do
            y = torch.nn.functional.linear(x, (self.codes * self.scales[:, None]).to(x.dtype))
        else:
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
        self.steps, self.lows = steps, lows
        self.bias = bias
        self._fused = _fused(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out] in x's dtype."""
        if self._fused is not None and self._fused.takes(x):
            y = self._fused.int4_product(x, self.pairs, self.steps, self.lows)
            return y if self.bias is None else y + self.bias
        nibbles = torch.stack([self.pairs & 15, self.pairs >> 4], dim=-1).view(*self.steps.shape, GROUP)
        lows, steps = self.lows[:, :, None].to(x.dtype), self.steps[:, :, None].to(x.dtype)
        values = torch.addcmul(lows, nibbles.to(x.dtype), steps)
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
