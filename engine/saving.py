"""Tensors into a file that others may read too: safetensors makes its files for their owner alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch

_MODE = 0o644  # users share a cache, serve what another converted, and train on what another made


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Writes tensors, for all to read. metadata: the file's own; left out, a model's."""
    safetensors.torch.save_file(dict(tensors), path, metadata=dict(metadata or {"format": "pt"}))
    path.chmod(_MODE)


def save_arrays(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Writes arrays, for all to read."""
    safetensors.numpy.save_file(dict(arrays), path)
    path.chmod(_MODE)
