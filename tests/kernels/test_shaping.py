"""Rows shaped on a device have the bits of rows shaped on the host."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.penalties import History, Penalties, penalise, row_edits
from kernels.shaping import apply_bitmasks, apply_edits

VOCAB = 70
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=8)
PENALTIES = st.builds(
    Penalties.build,
    presence=st.sampled_from([0.0, 0.7]),
    frequency=st.sampled_from([0.0, 0.3]),
    repetition=st.sampled_from([1.0, 1.3]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-3.3, 0.1, 5.0]), max_size=3),
    min_tokens=st.integers(0, 6),
    stop_ids=st.frozensets(st.integers(0, VOCAB - 1), max_size=3),
)


@settings(deadline=None)
@given(st.lists(st.tuples(PENALTIES, TOKENS, TOKENS, TOKENS), min_size=1, max_size=4), st.integers(0, 2**32))
def test_edits_are_what_penalise_does(
    sessions: list[tuple[Penalties, list[int], list[int], list[int]]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(len(sessions) + 2, VOCAB)).astype(np.float32)
    rows = rng.permutation(len(logits))[: len(sessions)]
    wanted, edits = logits.copy(), []
    for row, (penalties, prompt, output, path) in zip(rows, sessions, strict=True):
        history = History(prompt)
        history.commit(output)
        penalise(wanted[row], penalties, history, path)
        edits.append(row_edits(penalties, history, path))
    shaped = torch.from_numpy(logits.copy())
    apply_edits(shaped, rows, edits)
    assert np.array_equal(shaped.numpy(), wanted)


def test_bits_say_which_tokens_stay() -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(150, VOCAB)).astype(np.float32)
    rows = rng.permutation(150)[:130]
    allowed = rng.random((130, 96)) < 0.4
    masks = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    shaped = torch.from_numpy(logits.copy())
    apply_bitmasks(shaped, rows, masks)
    wanted = logits.copy()
    wanted[rows] = np.where(allowed[:, :VOCAB], logits[rows], -np.inf)
    assert np.array_equal(shaped.numpy(), wanted)
