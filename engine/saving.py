"""Tensors into a file that others may read too: safetensors makes its files for their owner alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch
from safetensors import SafetensorError

_MODE = 0o644  # users share a cache, serve what another converted, and train on what another made


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Writes tensors, for all to read. metadata: the file's own; left out, a model's. OSError where it cannot."""
    with _writing(path):
        safetensors.torch.save_file(dict(tensors), path, metadata=dict(metadata or {"format": "pt"}))


def save_arrays(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Writes arrays, for all to read. OSError where it cannot."""
    with _writing(path):
        safetensors.numpy.save_file(dict(arrays), path)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:  # of a full disk too
        raise OSError(f"{path.name}: {error}") from error
    path.chmod(_MODE)
