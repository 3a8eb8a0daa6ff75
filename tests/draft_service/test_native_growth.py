"""Trees that the C kernels grow: the same, node for node, as those grown step by step in Python over the same head."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from draft_service.drafters.base import Draft
from draft_service.drafters.eagle import EagleDrafter
from draft_service.drafters.factory import make_drafter
from draft_service.drafters.growing import Carried, grow
from draft_service.drafters.kv import Sequence
from draft_service.drafters.models import HeadModel, Tips
from engine.batch import Segment
from outrider.args import DraftArgs
from outrider.tree import ROOT

_SESSIONS, _ROWS = 3, 20


@pytest.fixture(scope="module", params=["EAGLE", "EAGLE3", "NEXTN"])
def model(request: pytest.FixtureRequest) -> HeadModel:
    """A head that comes with Outrider."""
    args = DraftArgs(speculative_algorithm=request.param, max_sessions=8, draft_max_total_tokens=4096, threads=2)
    drafter = cast("EagleDrafter", make_drafter(args))
    assert isinstance(drafter._model, HeadModel)
    return drafter._model


def opened(model: HeadModel) -> tuple[list[Sequence], Tips]:
    """Sequences of several lengths, run on random states, and what may follow them."""
    rng, torch_rng = np.random.default_rng(0), torch.Generator().manual_seed(0)
    sequences, segments, rows = [], [], 0
    for count in range(_ROWS, _ROWS + _SESSIONS):
        sequences.append(model.cache.open())
        tokens = rng.integers(10, 1000, count).astype(np.int32)
        segments.append(Segment(sequences[-1].table_row, 0, tokens, model.cache.append(sequences[-1], count)))
        rows += count
    features = torch.randn(rows, model.feature_width, generator=torch_rng)
    return sequences, model.run(segments, model.fuse(features), 16)


def grown(model: HeadModel, monkeypatch: pytest.MonkeyPatch, *, in_python: bool, **shape: Any) -> list[Draft]:
    """Trees, each of `num_nodes` nodes; nothing of them stays in the cache."""
    sequences, tips = opened(model)
    with monkeypatch.context() as patch:
        if in_python:
            patch.setattr(model, "grower", None)
        before = model.cache.num_free
        nodes = [shape.pop("num_nodes")] * len(sequences)
        drafts = grow(model, sequences, tips, num_nodes=nodes, **shape)
    assert model.cache.num_free == before
    for sequence in reversed(sequences):
        model.cache.close(sequence)
    return drafts


@pytest.mark.parametrize(
    ("num_steps", "topk", "num_nodes"), [(3, 1, 3), (1, 4, 4), (5, 4, 7), (5, 4, 60), (7, 3, 11), (2, 8, 30)]
)
def test_the_same_trees(
    model: HeadModel, num_steps: int, topk: int, num_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"num_steps": num_steps, "topk": topk, "num_nodes": num_nodes}
    for ours, reference in zip(
        grown(model, monkeypatch, in_python=False, **shape), grown(model, monkeypatch, in_python=True, **shape),
        strict=True,
    ):  # fmt: skip
        assert ours.tokens.tolist() == reference.tokens.tolist()
        assert ours.parents.tolist() == reference.parents.tolist()
        np.testing.assert_allclose(ours.probabilities, reference.probabilities, rtol=1e-5)
        states, wanted = (cast("Carried", draft.memo) for draft in (ours, reference))
        assert states.entries.tolist() == wanted.entries.tolist()
        run = [ROOT, *np.flatnonzero(states.entries >= 0).tolist()]
        found, expected = states.rows(run), wanted.rows(run)
        assert found is not None
        assert expected is not None
        assert torch.equal(found, expected)


def test_it_can_be_stopped_before_each_step(model: HeadModel) -> None:
    class Left(Exception):
        pass

    steps = 0

    def check() -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise Left

    sequences, tips = opened(model)
    before = model.cache.num_free
    with pytest.raises(Left):
        grow(model, sequences, tips, num_steps=5, topk=4, num_nodes=[7] * len(sequences), check=check)
    assert model.cache.num_free == before
    for sequence in sequences:
        model.cache.close(sequence)


def test_a_token_without_an_embedding_is_refused(model: HeadModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model.grower is not None
    monkeypatch.setattr(model.grower, "_num_read", 1)
    with pytest.raises(ValueError, match="outside its own embedding"):
        grown(model, monkeypatch, in_python=False, num_steps=3, topk=4, num_nodes=7)
