"""rms_norm against transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kernels.norm import rms_norm


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-6), (torch.bfloat16, 0.0)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_rms_norm(dtype: torch.dtype, atol: float, scale: float) -> None:
    x = (torch.randn(5, 96) * scale).to(dtype)
    norm = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    weight = torch.randn(96).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(weight)
        torch.testing.assert_close(rms_norm(x, weight, 1e-5), norm(x), atol=atol, rtol=0)


def test_zero_rows_stay_finite() -> None:
    assert rms_norm(torch.zeros(2, 16), torch.ones(16), 1e-6).abs().max() == 0
