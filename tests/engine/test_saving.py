"""Files that others than who made them may read."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from engine.saving import save_arrays, save_tensors


def test_what_is_saved_is_readable_by_all(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_tensors({"a": torch.ones(2)}, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert load_file(path)["a"].tolist() == [1.0, 1.0]
    save_arrays({"b": np.arange(2)}, tmp_path / "arrays.safetensors")
    assert stat.S_IMODE((tmp_path / "arrays.safetensors").stat().st_mode) == 0o644
    assert load_file(tmp_path / "arrays.safetensors")["b"].tolist() == [0, 1]


def test_what_a_file_says_of_itself_is_a_models_unless_told(tmp_path: Path) -> None:
    for metadata in (None, {"algorithm": "EAGLE"}):
        save_tensors({"a": torch.ones(2)}, tmp_path / "a.safetensors", metadata)
        with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
            assert file.metadata() == (metadata or {"format": "pt"})
