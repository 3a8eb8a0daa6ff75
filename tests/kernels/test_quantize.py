"""Quantised weights and products with them, against plain arithmetic."""

from __future__ import annotations

import ctypes

import pytest
import torch

from kernels.native_linear import NativeLinear, ProductTeam
from kernels.quantize import FORMATS, GROUP, quantize_int4, quantize_int8
from kernels.quantized_linear import Int4Linear, Int8DynamicLinear, Int8Linear

SHAPES = [(1, 7, 16), (3, 70, 208), (13, 32, 576), (30, 40, 1536)]


def tensors(rows: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + n)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((rows, k), (n, k), (n,)))
    return x, weight * k**-0.5, bias


def by_c(
    library: ctypes.CDLL, method: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *,
    streams: bool = False,
) -> torch.Tensor:  # fmt: skip
    linear = NativeLinear(ProductTeam(library, 2), weight, bias, method)
    linear.matrix.streams = streams
    return linear(x)


def values_of(method: str, weight: torch.Tensor) -> torch.Tensor:
    return (quantize_int4(weight) if method == "int4" else quantize_int8(weight)).values().double()


def activations_of(method: str, x: torch.Tensor) -> torch.Tensor:
    """Rows as the method rounds them."""
    if method != "int8_dynamic":
        return x.double()
    scales = x.abs().amax(dim=1, keepdim=True) / 127
    return (x / scales).round().double() * scales.double()


@pytest.mark.parametrize("k", [16, 40, 576])
def test_weights_are_rounded_to_the_nearest_code(k: int) -> None:
    _, weight, _ = tensors(1, 50, k)
    weight[3] = 0
    weight[4] = 0.5
    eight = quantize_int8(weight)
    assert ((eight.values() - weight).abs() <= eight.scales[:, None] * 0.5001).all()
    assert not eight.values()[3].any()
    four = quantize_int4(weight)
    # Half a step, and what rounding the step and the low to bf16 costs.
    bounds = 0.52 * four.steps.float() + weight.abs().amax() * 2**-8
    assert ((four.values() - weight).abs() <= bounds.repeat_interleave(GROUP, dim=1)[:, :k]).all()
    assert torch.equal(four.values()[4], weight[4])


def test_weights_that_lie_on_the_grid_are_kept() -> None:
    generator = torch.Generator().manual_seed(1)
    nibbles = torch.randint(0, 16, (8, 4, GROUP), generator=generator).float()
    nibbles[..., 0], nibbles[..., 1] = 0, 15
    steps = torch.rand((8, 4, 1), generator=generator).bfloat16().float()
    weight = (nibbles * steps - 8 * steps).view(8, -1)
    torch.testing.assert_close(quantize_int4(weight).values(), weight, atol=1e-3, rtol=8e-3)


@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
@pytest.mark.parametrize("method", FORMATS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_c_product(library: ctypes.CDLL, method: str, rows: int, n: int, k: int, has_bias: bool) -> None:
    x, weight, bias = tensors(rows, n, k)
    expected = activations_of(method, x) @ values_of(method, weight).T + (bias.double() if has_bias else 0)
    y = by_c(library, method, x, weight, bias if has_bias else None)
    torch.testing.assert_close(y.double(), expected, atol=3e-4, rtol=0)


@pytest.mark.parametrize("method", ["int8", "int8_dynamic"])
def test_whole_numbers_are_multiplied_exactly(library: ctypes.CDLL, method: str) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(-100, 101, (17, 624), generator=generator).float()
    weight = torch.randint(-40, 41, (45, 624), generator=generator).float()
    # Scales of exactly 1, so that every number is its own code.
    x[:, 0] = 127.0 if method == "int8_dynamic" else 32767.0
    weight[:, 0] = 0
    weight[:, 1] = 127.0
    assert torch.equal(by_c(library, method, x, weight).double(), x.double() @ weight.double().T)


@pytest.mark.parametrize("method", FORMATS)
def test_the_largest_codes_do_not_overflow(library: ctypes.CDLL, method: str) -> None:
    x, weight = torch.full((2, 4096), 3.0), torch.full((32, 4096), -2.0)
    weight[:, ::2] = 2.0
    weight[1] = 2.0
    x[1, ::2] = -3.0
    expected = (activations_of(method, x) @ values_of(method, weight).T).float()
    torch.testing.assert_close(by_c(library, method, x, weight), expected, atol=0.02, rtol=1e-4)


@pytest.mark.parametrize("method", FORMATS)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(library: ctypes.CDLL, method: str) -> None:
    x, weight, _ = tensors(40, 96, 576)
    together = by_c(library, method, x, weight)
    for count in range(1, 27):
        for streams in (False, True):  # past the caches, or not
            assert torch.equal(by_c(library, method, x[:count].contiguous(), weight, streams=streams), together[:count])


@pytest.mark.parametrize("method", FORMATS)
def test_rows_of_zeros_and_rows_that_are_not_finite(library: ctypes.CDLL, method: str) -> None:
    x, weight, bias = tensors(5, 40, 208)
    alone = by_c(library, method, x, weight, bias)
    x[1], x[2, 7], x[3, 100] = 0, torch.nan, torch.inf
    y = by_c(library, method, x, weight, bias)
    assert torch.equal(y[1], bias)
    assert y[2:4].isnan().all()
    assert torch.equal(y[[0, 4]], alone[[0, 4]])


@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("method", "layer"), [("int8", Int8Linear), ("int8_dynamic", Int8DynamicLinear), ("int4", Int4Linear)]
)
def test_torch_layers(method: str, layer: type[Int8Linear], rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight, bias = tensors(rows, n, k)
    x = x.to(dtype)
    expected = activations_of(method, x.float()) @ values_of(method, weight).T + bias.double()
    y = layer(weight.to(dtype) if dtype is torch.float32 else weight, bias.to(dtype))(x)
    assert y.dtype is dtype
    torch.testing.assert_close(y.double(), expected, atol=1e-5 if dtype is torch.float32 else 0.06, rtol=0)


@pytest.mark.parametrize("layer", [Int8Linear, Int8DynamicLinear, Int4Linear])
@pytest.mark.parametrize("rows", [1, 80])
def test_half_precision_holds_what_its_results_need(layer: type[Int8Linear], rows: int) -> None:
    """Sums of codes alone would be above 65,504."""
    x, weight, _ = tensors(rows, 32, 576)
    x[:, ::64] *= 600
    y = layer(weight)(x.half())
    expected = x.half().float() @ weight.T
    assert y.dtype == torch.float16
    assert y.isfinite().all()
    torch.testing.assert_close(y.float(), expected, atol=0.15 * float(expected.abs().max()), rtol=0)


def test_both_ways_quantise_rows_alike(library: ctypes.CDLL) -> None:
    x, weight, _ = tensors(20, 64, 576)
    torch.testing.assert_close(
        by_c(library, "int8_dynamic", x, weight), Int8DynamicLinear(weight)(x), atol=1e-2, rtol=0
    )
