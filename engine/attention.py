"""From the name of an attention backend to the function that serves it; nothing is imported that was not asked for."""

from __future__ import annotations

import importlib.util
from typing import Protocol

import torch

from kernels.attention import torch_native
from kernels.attention.layout import AttentionLayout
from outrider.errors import StartupError

BACKENDS = ("auto", "torch_native", "triton", "flashinfer")
# Accepted by SGLang's flag of the same name, and not offered here.
_OF_SGLANG = frozenset({
    "aiter", "ascend", "cutlass_mla", "dual_chunk_flash_attn", "fa3", "fa4", "flashmla", "flex_attention",
    "hybrid_linear_attn", "intel_amx", "intel_xpu", "nsa", "trtllm_mha", "trtllm_mla", "wave",
})  # fmt: skip


class Attention(Protocol):
    """A backend: kernels.attention.reference.attention says what it computes."""

    def __call__(
        self, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, layout: AttentionLayout, scale: float, /
    ) -> torch.Tensor: ...


def attention_backend(name: str, device: torch.device, *, page_size: int = 1) -> Attention:
    """The backend `name` for one model on `device`, whose pool has pages of `page_size`.

    auto: triton on a CUDA device where it is installed, else torch_native. Raises StartupError for a name that is
    unknown or not offered, and for one that cannot run here.
    """
    if name == "auto":
        name = "triton" if device.type == "cuda" and _is_installed("triton") else "torch_native"
    if name == "torch_native":
        return torch_native.attention
    if name == "triton":
        return _triton(device, page_size)
    if name == "flashinfer":
        return _flashinfer(device)
    known = "is SGLang's and not offered here" if name in _OF_SGLANG else "is unknown"
    raise StartupError(f"attention backend {name!r} {known}; there are {', '.join(BACKENDS)}")


def _triton(device: torch.device, page_size: int) -> Attention:
    if device.type != "cuda":
        raise StartupError(f"attention backend triton needs a CUDA device; this one is {device}: use torch_native")
    if not _is_installed("triton"):
        raise StartupError("attention backend triton needs the package triton, which comes with torch for CUDA")
    from kernels.attention.triton import TritonAttention

    return TritonAttention(device, page_size=page_size)


def _flashinfer(device: torch.device) -> Attention:
    from kernels.attention import flashinfer

    try:
        return flashinfer.FlashInferAttention(device, flashinfer.load_flashinfer(device))
    except ImportError as error:
        raise StartupError(f"attention backend flashinfer needs the package flashinfer-python: {error}") from error
    except ValueError as error:
        raise StartupError(str(error)) from error


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
