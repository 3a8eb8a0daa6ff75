"""The Triton norm and gate against kernels.norm and kernels.gating."""

from __future__ import annotations

import pytest
import torch

from kernels.gating import gated
from kernels.norm import add_rms_norm, rms_norm
from tests.kernels.interpreted import INTERPRETED, run_under_the_interpreter

DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)
CLOSE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def test_under_the_interpreter() -> None:
    run_under_the_interpreter(__file__)


def some(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 96, 576, 4096])
def test_rows(device: torch.device, dtype: torch.dtype, width: int) -> None:
    from kernels import norm_triton

    x, weight = some(3, width, dtype=dtype), some(width, dtype=dtype)
    found = norm_triton.rms_norm(x.to(device), weight.to(device), 1e-5)
    torch.testing.assert_close(found.cpu(), rms_norm(x, weight, 1e-5), atol=0, rtol=CLOSE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 96, 576, 4096])
def test_sums_and_their_norms(device: torch.device, dtype: torch.dtype, width: int) -> None:
    """They are to the bit what the norm makes of a sum that was rounded first."""
    from kernels import norm_triton

    x, weight = some(5, width, dtype=dtype), some(width, dtype=dtype)
    more = some(5, 2, width, dtype=dtype)[:, 1]
    total, found = norm_triton.add_rms_norm(x.to(device), more.to(device), weight.to(device), 1e-5)
    assert torch.equal(total.cpu(), x + more)
    assert torch.equal(found, norm_triton.rms_norm(total, weight.to(device), 1e-5))
    torch.testing.assert_close(found.cpu(), add_rms_norm(x, more, weight, 1e-5)[1], atol=0, rtol=CLOSE[dtype])


@pytest.mark.gpu
def test_heads_that_are_a_view(device: torch.device) -> None:
    from kernels import norm_triton

    whole, weight = some(4, 9, 64, dtype=torch.float32), some(64, dtype=torch.float32)
    part = whole.to(device)[:, 6:8]
    found = norm_triton.rms_norm(part, weight.to(device), 1e-6)
    torch.testing.assert_close(found.cpu(), rms_norm(whole[:, 6:8], weight, 1e-6), atol=1e-6, rtol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 1536, 2500])
def test_gates(device: torch.device, dtype: torch.dtype, width: int) -> None:
    from kernels import norm_triton

    gate_up = some(5, 2 * width, dtype=dtype)
    gate_up[0, 0] = 1000.0
    gate_up[0, 1] = -1000.0
    found = norm_triton.gated(gate_up.to(device))
    torch.testing.assert_close(found.cpu(), gated(gate_up), atol=1e-6, rtol=CLOSE[dtype])


@pytest.mark.gpu
def test_no_rows(device: torch.device) -> None:
    from kernels import norm_triton

    empty = torch.empty(0, 32, device=device)
    weight = torch.ones(32, device=device)
    assert norm_triton.rms_norm(empty, weight, 1e-5).shape == (0, 32)
    assert [part.shape for part in norm_triton.add_rms_norm(empty, empty, weight, 1e-5)] == [(0, 32), (0, 32)]
    assert norm_triton.gated(empty).shape == (0, 16)
