"""Files that others than who made them may read."""

from __future__ import annotations

import stat
from pathlib import Path

import torch
from safetensors.torch import load_file

from engine.saving import save_tensors


def test_what_is_saved_is_readable_by_all(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_tensors({"a": torch.ones(2)}, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert load_file(path)["a"].tolist() == [1.0, 1.0]
