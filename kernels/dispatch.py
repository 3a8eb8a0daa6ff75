"""Whether Triton's kernels serve, or torch's operators."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version

import torch


def has_triton(device: torch.device) -> bool:
    """Whether `device` is one that Triton compiles for, and Triton is installed."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def triton_version(device: torch.device) -> str:
    """Triton's version, for numerics_id: norms and gates are Triton's where it is; empty where they are torch's."""
    return f"triton {version('triton')}" if has_triton(device) else ""


def runs_triton(x: torch.Tensor) -> bool:
    """Whether kernels without a gradient, which torch.compile cannot see into, may take x."""
    return x.is_cuda and not torch.is_grad_enabled() and not torch.compiler.is_compiling() and has_triton(x.device)
