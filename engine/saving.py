"""Tensors into a file that others may read too: safetensors makes its files for their owner alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Writes a model's tensors, for all to read: users share a cache, and may serve what another converted."""
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(0o644)
