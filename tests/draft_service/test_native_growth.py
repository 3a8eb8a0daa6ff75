"""Trees that the C kernels grow: the same, node for node, as those grown step by step in Python over the same head."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any, cast

import numpy as np
import pytest
import torch

from draft_service.drafters.ahead import trees_ahead
from draft_service.drafters.base import AheadRequest, Draft
from draft_service.drafters.carrying import Carried
from draft_service.drafters.eagle import EagleDrafter
from draft_service.drafters.factory import make_drafter
from draft_service.drafters.features import Piece
from draft_service.drafters.growing import grow
from draft_service.drafters.kv import CacheRows
from draft_service.drafters.models import HeadModel, Tip, Tips
from draft_service.drafters.paths import Behind, Start
from draft_service.drafters.shape import TreeShape
from draft_service.drafters.trees import TreeGrower
from draft_service.session import Grown
from draft_service.sessions import InVerification
from engine.batch import Segment
from outrider.args import DraftArgs
from outrider.tree import ROOT
from outrider.wire import Ids
from tests.draft_service.model_rig import session

_SESSIONS, _ROWS, _NUM_TOP = 3, 20, 16


@pytest.fixture(scope="module", params=["EAGLE", "EAGLE3", "NEXTN"])
def model(request: pytest.FixtureRequest) -> HeadModel:
    """A head that comes with Outrider."""
    args = DraftArgs(speculative_algorithm=request.param, max_sessions=8, draft_max_total_tokens=4096, threads=2)
    drafter = cast("EagleDrafter", make_drafter(args))
    assert isinstance(drafter.model, HeadModel)
    return drafter.model


def texts(model: HeadModel) -> list[tuple[Ids, torch.Tensor]]:
    """Tokens of several lengths, and features of their rows."""
    rng, torch_rng = np.random.default_rng(0), torch.Generator().manual_seed(0)
    counts = range(_ROWS, _ROWS + _SESSIONS)
    features = torch.randn(sum(counts), model.feature_width, generator=torch_rng).bfloat16()
    return [
        (rng.integers(10, 1000, count).astype(np.int32), own)
        for count, own in zip(counts, features.split(list(counts)), strict=True)
    ]


def opened(model: HeadModel, *, behind: int = 0) -> tuple[list[CacheRows], Tips]:
    """Sequences with rows for all texts, and what may follow those that were run: all but the last `behind`."""
    sequences, segments = [], []
    for tokens, _ in texts(model):
        count = len(tokens) - behind
        sequences.append(model.cache.open())
        slots = model.cache.append(sequences[-1], len(tokens))[:count]
        segments.append(Segment(sequences[-1].table_row, 0, tokens[:count], slots))
    features = torch.cat([own[: len(own) - behind] for _, own in texts(model)])
    return sequences, model.run(segments, model.fuse(features), _NUM_TOP)


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


@pytest.mark.parametrize("topk", [1, 4])
def test_they_end_early_where_it_is_unlikely_that_acceptance_comes_so_far(
    model: HeadModel, topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees are as after fewer steps, and both kinds end in the same place."""
    shape = {"topk": topk, "num_nodes": 40}
    whole = grown(model, monkeypatch, in_python=False, num_steps=6, **shape)
    assert all(draft.grown == Grown(topk, 6) for draft in whole)
    ends: set[int] = set()
    for least_reach in (1e-6, 1e-3, 0.01, 0.1, 0.5, 2.0):
        ours, reference = (
            grown(model, monkeypatch, in_python=in_python, num_steps=6, least_reach=least_reach, **shape)
            for in_python in (False, True)
        )
        made = ours[0].grown
        assert made is not None
        ends.add(made.num_steps)
        shorter = grown(model, monkeypatch, in_python=False, num_steps=made.num_steps, **shape)
        steps: list[None] = []
        one_by_one = grown(
            model, monkeypatch, in_python=False, num_steps=6, least_reach=least_reach,
            check=lambda steps=steps: steps.append(None), **shape,
        )  # fmt: skip
        assert len(steps) == min(made.num_steps, 5)  # before each but the first, and where it ended
        for draft, short, *others in zip(ours, shorter, reference, one_by_one, strict=True):
            for same in (draft, *others):
                assert same.grown == Grown(topk, made.num_steps, made.num_steps < 6)
                assert same.tokens.tolist() == short.tokens.tolist()
                assert same.parents.tolist() == short.parents.tolist()
                assert cast("Carried", same.memo).entries.tolist() == cast("Carried", short.memo).entries.tolist()
    assert len(ends) > 2


@pytest.mark.parametrize(("num_steps", "topk", "num_nodes"), [(3, 1, 3), (1, 4, 4), (5, 4, 7)])
def test_rows_that_were_not_run_yet_are_run_in_the_same_call(
    model: HeadModel, num_steps: int, topk: int, num_nodes: int
) -> None:
    shape: dict[str, Any] = {"num_steps": num_steps, "topk": topk, "num_nodes": [num_nodes] * _SESSIONS}
    whole, tips = opened(model)
    expected = grow(model, whole, tips, **shape)
    sequences, _ = opened(model, behind=2)
    found: list[Tip] = []
    late = [
        Behind(tokens[-2:], partial(Piece, own, len(own) - 2, len(own)), found.append) for tokens, own in texts(model)
    ]
    drafts = grow(model, sequences, late, num_top=_NUM_TOP, **shape)
    for ours, wanted in zip(drafts, expected, strict=True):
        assert ours.tokens.tolist() == wanted.tokens.tolist()
        assert ours.parents.tolist() == wanted.parents.tolist()
        assert ours.probabilities.tolist() == wanted.probabilities.tolist()
    for ours, wanted in zip(found, (Tip(tips, row) for row in range(_SESSIONS)), strict=True):
        assert ours.batch.named()[ours.row] == wanted.batch.named()[wanted.row]
        assert ours.states is not None
        assert wanted.states is not None
        assert torch.equal(ours.states, wanted.states)
    for sequence in (*whole, *sequences):
        model.cache.close(sequence)


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


@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("max_outcomes", [1, 3])
def test_trees_drafted_ahead_are_the_same(
    model: HeadModel, topk: int, max_outcomes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bonus is run in the call that grows the tree below it, and in Python by itself."""
    sequences, tips = opened(model)
    drafts = grow(model, sequences, tips, num_steps=3, topk=topk, num_nodes=[7] * _SESSIONS)
    requests = [
        AheadRequest(
            InVerification.whole(session(tokens.tolist()), draft.tree, draft.probabilities, draft.memo),
            7,
            8,
            max_outcomes,
        )
        for (tokens, _), draft in zip(texts(model), drafts, strict=True)
    ]
    starts = [Start(sequence, Tip(tips, row)) for row, sequence in enumerate(sequences)]
    grower, before = TreeGrower(model, TreeShape(4, topk, 8)), model.cache.num_free
    ours = trees_ahead(grower, requests, starts)
    with monkeypatch.context() as patch:
        patch.setattr(model, "grower", None)
        expected = trees_ahead(grower, requests, starts)
    assert model.cache.num_free == before
    assert sum(map(len, ours)) >= _SESSIONS
    for found, wanted in zip(chain(*ours), chain(*expected), strict=True):
        assert found.assumed.tolist() == wanted.assumed.tolist()
        assert found.tokens.tolist() == wanted.tokens.tolist()
        assert found.parents.tolist() == wanted.parents.tolist()
        assert found.probabilities.tolist() == pytest.approx(wanted.probabilities.tolist(), rel=1e-6)
    for sequence in reversed(sequences):
        model.cache.close(sequence)
