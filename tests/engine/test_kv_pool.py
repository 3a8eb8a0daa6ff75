"""The pool's tensors: zero at first, moved between slots as if all at once."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config import ModelConfig
from engine.feature_spec import FeatureSpec
from engine.kv_pool import KVPool, layer_stride
from engine.runner import ModelRunner
from kernels.native.memory import HUGE_PAGE
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


@given(num_layers=st.integers(1, 200), size=st.integers(1, 2**34))
def test_no_two_layers_begin_at_the_same_place_of_a_huge_page(num_layers: int, size: int) -> None:
    stride = layer_stride(num_layers, size)
    if size < HUGE_PAGE:
        assert stride == size
        return
    places = sorted(layer * stride % HUGE_PAGE for layer in range(num_layers))
    apart = min((b - a for a, b in pairwise([*places, places[0] + HUGE_PAGE])), default=HUGE_PAGE)
    assert apart >= HUGE_PAGE / (2 * num_layers)
    assert size <= stride <= size + 2 * HUGE_PAGE / num_layers


def test_a_pool_of_many_pages_holds_every_layer_apart(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    slot = config.num_kv_heads * config.head_dim * 4
    num_slots = 3 * HUGE_PAGE // slot + 5
    pool = KVPool(config, FeatureSpec.parse("none"), num_slots, torch.float32, torch.device("cpu"))
    assert pool.k.shape == (config.num_layers, num_slots, config.num_kv_heads, config.head_dim)
    for layer, plane in enumerate(pool.k):
        plane.fill_(layer + 1)
    assert all((plane == layer + 1).all() for layer, plane in enumerate(pool.k))
    assert not pool.v.any()
    assert len({plane.data_ptr() % HUGE_PAGE for plane in pool.k}) == config.num_layers
    pool.move(slots(0, 1), slots(num_slots - 1, num_slots - 2))
    assert (pool.k[1] == 2).all()
