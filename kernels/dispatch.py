"""Whether Triton's kernels serve, or torch's operators."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version

import torch

# Ampere's: older GPUs have neither the shared memory that attention's tiles take, nor bf16 in their tensor cores.
_LEAST_CAPABILITY = (8, 0)


def triton_lacks(device: torch.device) -> str | None:
    """What our Triton kernels lack on `device`, and what to do without; None: they serve."""
    if device.type != "cuda":
        return f"a CUDA device; this one is {device}: use torch_native"
    if importlib.util.find_spec("triton") is None:
        return "the package triton, which comes with torch for CUDA"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        least, this = (".".join(map(str, pair)) for pair in (_LEAST_CAPABILITY, capability))
        return f"compute capability {least}; this GPU has {this}: use torch_native"
    return None


def has_triton(device: torch.device) -> bool:
    """Whether our Triton kernels serve on `device`, all of them: attention, norms, products, draws, trees."""
    return triton_lacks(device) is None


def triton_version(device: torch.device) -> str:
    """Triton's version, for numerics_id: norms and gates are Triton's where it is; empty where they are torch's."""
    return f"triton {version('triton')}" if has_triton(device) else ""


def runs_triton(x: torch.Tensor) -> bool:
    """Whether kernels without a gradient, which torch.compile cannot see into, may take x."""
    return x.is_cuda and not torch.is_grad_enabled() and not torch.compiler.is_compiling() and has_triton(x.device)
