"""The Triton products with quantised weights against plain arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import pad

from kernels.quantize import GROUP, quantize_int4, quantize_int8
from tests.kernels.interpreted import run_under_the_interpreter

SHAPES = [(1, 7, 16), (5, 70, 208), (17, 33, 300), (33, 64, 128)]
# Of results near 1; the interpreter multiplies bf16 in fp32.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def test_under_the_interpreter() -> None:
    run_under_the_interpreter(__file__)


def by_triton(method: str, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The product, and the weights that it was with."""
    from kernels.quantized_triton import int4_product, int8_product

    if method == "int8":
        eight = quantize_int8(weight)
        return int8_product(x, eight.codes, eight.scales), eight.values()
    four = quantize_int4(weight)
    padded = pad(four.nibbles, (0, -weight.shape[1] % GROUP))
    return int4_product(x, padded[:, ::2] | padded[:, 1::2] << 4, four.steps, four.lows), four.values()


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_products(device: torch.device, method: str, dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn((rows, k), generator=generator).to(device, dtype)
    weight = (torch.randn((n, k), generator=generator) * k**-0.5).to(device)
    y, values = by_triton(method, x, weight)
    assert y.dtype is dtype
    expected = x.double() @ values.double().T
    torch.testing.assert_close(y.double(), expected, atol=TOLERANCE[dtype], rtol=0.01)
    if rows > 1:
        assert torch.equal(by_triton(method, x[:1], weight)[0], y[:1])
