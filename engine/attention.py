"""From the names of attention backends to the function that serves a model; nothing is imported that was not asked for.

SGLang's flags: `--attention-backend` names one for everything; `--prefill-attention-backend` and
`--decode-attention-backend` override it for chunks of prompts and for single rows; `--speculative-attention-mode` says
which of the two ways verifies trees. Where both names are the same, that choice is one of kernels within the backend:
wide tiles or decode's narrow ones in triton, the prefill or the decode wrapper in flashinfer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from engine.config import ModelConfig
from engine.cpu_kernels import cpu_kernels
from kernels.attention import torch_native
from kernels.attention.layout import AttentionLayout
from kernels.attention.split import SplitAttention
from kernels.dispatch import has_triton, triton_lacks
from outrider.errors import StartupError

# The flags that backends come from, those of prefill and decode aside: a target's, and a draft model's.
ATTENTION, DRAFT_ATTENTION = "--attention-backend", "--speculative-draft-attention-backend"
BACKENDS = ("auto", "torch_native", "triton", "flashinfer")
# Accepted by SGLang's flag of the same name, and not offered here.
_OF_SGLANG = frozenset({
    "aiter", "ascend", "cutlass_mla", "dual_chunk_flash_attn", "fa3", "fa4", "flashmla", "flex_attention",
    "hybrid_linear_attn", "intel_amx", "intel_xpu", "nsa", "trtllm_mha", "trtllm_mla", "wave",
})  # fmt: skip
# Which can read keys and values in fp8.
_READ_FP8 = frozenset({"torch_native", "triton"})
_E4M3_CAPABILITY = (8, 9)


class Attention(Protocol):
    """A backend: kernels.attention.reference.attention says what it computes."""

    def __call__(
        self, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, layout: AttentionLayout, scale: float, /, *,
        soft_cap: float = 0.0, window: int = 0,
    ) -> torch.Tensor: ...  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """What the flags say; None: as `backend`, which is `flag`'s."""

    backend: str = "auto"
    prefill: str | None = None
    decode: str | None = None
    verify: Literal["prefill", "decode"] = "prefill"
    flag: str = ATTENTION

    @property
    def flags(self) -> tuple[str, str]:
        """The flags that name the backends of prefill and of decode."""
        own = ((self.prefill, "--prefill-attention-backend"), (self.decode, "--decode-attention-backend"))
        prefill, decode = (self.flag if name is None else flag for name, flag in own)
        return prefill, decode

    @property
    def is_open(self) -> bool:
        """Whether nothing was named, so that a decoder with attention of its own may serve."""
        return all(name in (None, "auto") for name in (self.backend, self.prefill, self.decode))

    def resolved(self, device: torch.device) -> AttentionChoice:
        """The choice with names of backends that are there only. StartupError for one that is not."""
        backends = (self.prefill or self.backend, self.decode or self.backend)
        prefill, decode = (_resolved(name, device, flag) for name, flag in zip(backends, self.flags, strict=True))
        if self.verify == "decode" and prefill == decode == "torch_native":
            raise StartupError(
                "--speculative-attention-mode is decode, but torch_native has one kernel for all; "
                "leave it at prefill, or name a backend for prefill or decode that is another one"
            )
        return AttentionChoice(_resolved(self.backend, device, self.flag), prefill, decode, self.verify, self.flag)

    def __str__(self) -> str:
        """The backends of prefill, decode and trees, for numerics_id and the log."""
        names = dict.fromkeys(name or self.backend for name in (self.prefill, self.decode))
        return "+".join(names) + ("" if self.verify == "prefill" else " trees as decode")


def build_attention(choice: AttentionChoice, device: torch.device, *, page_size: int = 1) -> Attention:
    """Makes the attention of a model on `device` with a pool of pages of `page_size`. StartupError if it cannot run."""
    (prefill_flag, decode_flag), choice = choice.flags, choice.resolved(device)
    prefill, decode = str(choice.prefill), str(choice.decode)
    trees_with_decode = choice.verify == "decode"
    if prefill == decode == "triton":
        return _triton(device, page_size, prefill_flag, narrow_trees=trees_with_decode)
    one = attention_backend(prefill, device, page_size=page_size, flag=prefill_flag)
    if prefill == decode and not trees_with_decode:
        return one
    if decode == "flashinfer" and trees_with_decode:
        other: Attention = _flashinfer(device, decode_flag, alone=True)
    elif decode == "triton":
        other = _triton(device, page_size, decode_flag, narrow_trees=trees_with_decode)
    else:
        other = attention_backend(decode, device, page_size=page_size, flag=decode_flag)
    return SplitAttention(one, other, trees_with_decode=trees_with_decode)


def attention_backend(name: str, device: torch.device, *, page_size: int = 1, flag: str = ATTENTION) -> Attention:
    """The backend `name` for one model on `device`, whose pool has pages of `page_size`.

    auto: triton where it can run (kernels.dispatch), else torch_native. Raises StartupError, with the `flag` that it
    comes from, for a name that is unknown or not offered, and for one that cannot run here.
    """
    name = _resolved(name, device, flag)
    if name == "triton":
        return _triton(device, page_size, flag)
    if name == "flashinfer":
        return _flashinfer(device, flag)
    return torch_native.attention


def fused_rope(choice: AttentionChoice, device: torch.device, kept: torch.dtype) -> Callable[..., torch.Tensor] | None:
    """kernels.attention.triton_rope.rope_and_store where Triton attends over a pool that it writes, else None."""
    resolved = choice.resolved(device)
    if device.type != "cuda" or "triton" not in (resolved.prefill, resolved.decode) or kept.itemsize == 1:
        return None
    from kernels.attention.triton_rope import rope_and_store

    return rope_and_store


def check_fp8(choice: AttentionChoice, dtype: torch.dtype, device: torch.device) -> None:
    """StartupError where a backend cannot read keys and values of an fp8 `dtype`."""
    resolved = choice.resolved(device)
    for flag, name in zip(choice.flags, (resolved.prefill, resolved.decode), strict=True):
        if name not in _READ_FP8:
            raise StartupError(
                f"{flag} {name} does not read {dtype} here; with --kv-cache-dtype use "
                f"{' or '.join(sorted(_READ_FP8))}, or leave it at auto"
            )
    if device.type == "cuda" and dtype is torch.float8_e4m3fn and "triton" in (resolved.prefill, resolved.decode):
        capability = torch.cuda.get_device_capability(device)
        if capability < _E4M3_CAPABILITY:
            raise StartupError(
                f"--kv-cache-dtype is fp8_e4m3, which triton reads on GPUs from compute capability 8.9 on; this one "
                f"has {capability[0]}.{capability[1]}: use fp8_e5m2"
            )


def check_heads(choice: AttentionChoice, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """StartupError for a model whose heads Triton's kernels do not cover, where they would attend."""
    resolved = choice.resolved(device)
    if "triton" not in (resolved.prefill, resolved.decode):
        return
    from kernels.attention.triton_blocks import Heads

    try:
        Heads(config.num_heads, config.num_kv_heads, config.head_dim, dtype)
    except ValueError as error:
        raise StartupError(f"{error}: use {choice.flag} torch_native") from error


def _resolved(name: str, device: torch.device, flag: str) -> str:
    """The name of a backend that exists; auto's is the device's best."""
    if name == "auto":
        return "triton" if has_triton(device) else "torch_native"
    if name not in BACKENDS:
        known = "is SGLang's and not offered here" if name in _OF_SGLANG else "is unknown"
        raise StartupError(f"{flag} {name!r} {known}; there are {', '.join(BACKENDS)}")
    return name


def _triton(device: torch.device, page_size: int, flag: str, *, narrow_trees: bool = False) -> Attention:
    lacking = triton_lacks(device)
    if lacking is not None:
        raise StartupError(f"{flag} triton needs {lacking}")
    from kernels.attention.triton import TritonAttention

    return TritonAttention(device, page_size=page_size, narrow_trees=narrow_trees, library=cpu_kernels())


def _flashinfer(device: torch.device, flag: str, *, alone: bool = False) -> Attention:
    from kernels.attention import flashinfer

    try:
        return flashinfer.FlashInferAttention(device, flashinfer.load_flashinfer(device), alone=alone)
    except ImportError as error:
        raise StartupError(f"{flag} flashinfer needs the package flashinfer-python: {error}") from error
    except ValueError as error:
        raise StartupError(f"{flag} {error}") from error
