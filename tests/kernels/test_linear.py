"""Linear layers: oneDNN's packing and the C kernels' against the plain product."""

from __future__ import annotations

import ctypes

import pytest
import torch

from kernels.linear import TILE, Linear, can_pack, interleave_gates, pack_tiles
from kernels.native.library import CMatrix
from kernels.native_linear import ProductTeam

SHAPES = [(1, 32, 16), (3, 100, 48), (8, 64, 576), (13, 33, 30), (40, 96, 64)]


def tensors(rows: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((rows, k), (n, k), (n,)))
    return x.to(dtype), (weight * k**-0.5).to(dtype), bias.to(dtype)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    y = x.double() @ weight.double().T
    return (y if bias is None else y + bias.double()).float()


@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 3e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(rows: int, n: int, k: int, dtype: torch.dtype, atol: float, has_bias: bool) -> None:
    x, weight, bias = tensors(rows, n, k, dtype)
    y = Linear(weight, bias if has_bias else None)(x)
    assert y.dtype is dtype
    torch.testing.assert_close(y.float(), exact(x, weight, bias if has_bias else None), atol=atol, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types_are_not_packed(dtype: torch.dtype) -> None:
    weight = torch.randn(8, 8, dtype=dtype)
    assert not can_pack(weight)
    assert Linear(weight)(torch.ones(2, 8, dtype=dtype)).shape == (2, 8)


def by_c(
    library: ctypes.CDLL, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *,
    streams: bool = False,
) -> torch.Tensor:  # fmt: skip
    packed, y = pack_tiles(weight), torch.empty(len(x), len(weight))
    layout = weight.dtype is torch.float32
    matrix = CMatrix(packed.data_ptr(), None if bias is None else bias.data_ptr(), *weight.shape, layout, streams)
    wide = x.dtype is torch.float32
    ProductTeam(library, 1).multiply(matrix, x, y, wide=wide, narrow=not wide)
    return y


@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
@pytest.mark.parametrize("kind", ["fp32", "bf16 weights, fp32 rows", "bf16"])
def test_c_product(library: ctypes.CDLL, rows: int, n: int, k: int, kind: str) -> None:
    if kind == "bf16" and not library.outrider_has_bf16_dot():
        pytest.skip("this CPU does not multiply bf16")
    x, weight, bias = tensors(rows, n, k, torch.float32)
    if kind != "fp32":
        weight = weight.bfloat16()
    if kind == "bf16":
        x = x.bfloat16()
    torch.testing.assert_close(by_c(library, x, weight, bias), exact(x, weight, bias), atol=3e-6, rtol=0)


@pytest.mark.parametrize("kind", ["fp32", "bf16 weights, fp32 rows", "bf16"])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(library: ctypes.CDLL, kind: str) -> None:
    if kind == "bf16" and not library.outrider_has_bf16_dot():
        pytest.skip("this CPU does not multiply bf16")
    x, weight, _ = tensors(40, 96, 576, torch.float32)
    if kind != "fp32":
        weight = weight.bfloat16()
    if kind == "bf16":
        x = x.bfloat16()
    together = by_c(library, x, weight)
    for count in range(1, 27):
        for streams in (False, True):  # past the caches, or not
            assert torch.equal(by_c(library, x[:count].contiguous(), weight, streams=streams), together[:count])


def test_tiles_hold_their_outputs_side_by_side() -> None:
    weight = torch.arange(40 * 6, dtype=torch.float32).view(40, 6)
    tiles = pack_tiles(weight)
    assert tiles.shape == (2, 6, TILE)
    assert torch.equal(tiles[0, 2], weight[:32, 2])
    assert torch.equal(tiles[1, 5, :8], weight[32:, 5])
    assert not tiles[1, :, 8:].any()
    pairs = pack_tiles(weight.bfloat16())
    assert pairs.shape == (2, 3, TILE, 2)
    assert torch.equal(pairs[1, 1, 3], weight[35, 2:4].bfloat16())


def test_gates_and_ups_alternate() -> None:
    gate_up = torch.arange(64.0)[:, None]
    mixed = interleave_gates(gate_up)[:, 0].tolist()
    assert mixed[:16] == list(range(16))
    assert mixed[16:32] == list(range(32, 48))
    assert mixed[32:48] == list(range(16, 32))
