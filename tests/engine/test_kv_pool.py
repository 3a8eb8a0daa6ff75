"""The pool's tensors: zero at first, moved between slots as if all at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from engine.feature_spec import FeatureSpec
from engine.runner import ModelRunner
from tests.engine.tiny import save_model, sessions


def slots(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_moved_rows_are_read_where_they_went(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    runner = ModelRunner.load(
        tmp_path, dtype="float32", num_slots=60, max_sessions=2, max_len=20, features=FeatureSpec.parse("last")
    )
    pool, features = runner.pool, runner.features
    assert features is not None
    assert not pool.k.any()
    assert not pool.v.any()
    assert not features.any()
    stays, moves = sessions(runner, 2)
    tokens = [5, 9, 2, 7, 11, 3]
    runner.forward([stays.segment(tokens, 0), moves.segment(tokens, 0)])
    old = runner.slot_table[1, :6].copy()
    # Overlapping on purpose: a row goes where another one comes from.
    new = np.concatenate([old[1:], moves.take(1)])
    before = features[old].clone()
    pool.move(old, new)
    runner.slot_table[1, :6] = new
    assert torch.equal(features[new], before)
    logits = runner.forward([stays.segment([4]), moves.segment([4])])
    assert torch.equal(logits[0], logits[1])
