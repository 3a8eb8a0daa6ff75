"""Linear layers by the C kernels: right, and the same for a row whatever rows go with it."""

from __future__ import annotations

import pytest
import torch

from kernels.native.library import open_library
from kernels.native_linear import FORMATS, NativeLinear, ProductTeam, fits
from kernels.norm import rms_norm
from kernels.quantize import quantize_int4, quantize_int8
from outrider import env

SHAPES = [(1, 16), (33, 48), (64, 576), (97, 112)]


@pytest.fixture(scope="module")
def team() -> ProductTeam:
    return ProductTeam(open_library(env.home() / "kernels"), 2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quantization", [None, *FORMATS])
def test_products(team: ProductTeam, shape: tuple[int, int], dtype: torch.dtype, quantization: str | None) -> None:
    generator = torch.Generator().manual_seed(shape[0])
    weight = torch.randn(shape, generator=generator).to(dtype)
    bias = torch.randn(shape[0], generator=generator)
    x = torch.randn(45, shape[1], generator=generator).to(dtype)
    layer = NativeLinear(team, weight, bias, quantization)
    meant = {None: lambda w: w.float(), "int4": lambda w: quantize_int4(w).values()}.get(
        quantization, lambda w: quantize_int8(w).values()
    )(weight)
    y = layer(x)
    assert y.dtype is dtype
    exact = x.float() @ meant.T + bias
    rounding = 2**-8 if dtype is torch.bfloat16 else 2**-20
    coding = {"int8_dynamic": 2**-7, "int8": 2**-14, "int4": 2**-14}.get(quantization or "", 0.0)
    allowed = rounding * exact.abs() + (rounding + coding) * x.float().abs().amax(1, keepdim=True) * meant.abs().sum(1)
    assert ((y.float() - exact).abs() <= allowed).all()
    assert torch.equal(y, torch.cat([layer(row[None]) for row in x]))
    wide = layer.wide(x)
    assert wide.dtype is torch.float32
    assert torch.equal(wide.to(dtype), y)


def test_no_rows_and_no_bias(team: ProductTeam) -> None:
    layer = NativeLinear(team, torch.ones(5, 16), None)
    assert layer(torch.empty(0, 16)).shape == (0, 5)
    assert layer(torch.ones(2, 16)).tolist() == [[16.0] * 5] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quantization", [None, *FORMATS])
@pytest.mark.parametrize("parts", [1, 3])
def test_norms_before_a_product(
    team: ProductTeam, dtype: torch.dtype, quantization: str | None, parts: int
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(parts)
    weight = torch.randn(64, 144, generator=generator).to(dtype)
    norms = torch.rand(parts, 144 // parts, generator=generator) + 0.5
    x = (3 * torch.randn(45, 144, generator=generator)).to(dtype)
    layer = NativeLinear(team, weight, torch.randn(64, generator=generator), quantization)
    y = layer.of_normed(x, norms, 1e-5)
    assert y.dtype is dtype
    normed = rms_norm(x.float().unflatten(-1, norms.shape), norms, 1e-5).flatten(-2)
    expected = layer.wide(normed.to(dtype) if quantization is None else normed)
    allowed = 2**-7 if dtype is torch.bfloat16 else 2**-18
    allowed = max(allowed, 2**-6 if quantization == "int8_dynamic" else 0.0)  # codes that fall to the other side
    assert ((y.float() - expected).abs() <= allowed * normed.norm(dim=1, keepdim=True) * weight.float().norm()).all()
    assert torch.equal(y, torch.cat([layer.of_normed(row[None], norms, 1e-5) for row in x]))


def test_which_weights_fit() -> None:
    assert fits(torch.empty(3, 32))
    assert not fits(torch.empty(3, 24))
    assert not fits(torch.empty(3, 32, dtype=torch.float16))
