"""Trees that grow on a device, the host waiting once: the same, node for node, as those grown step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from draft_service.drafters.base import Draft
from draft_service.drafters.carrying import Carried
from draft_service.drafters.growing import grow
from draft_service.drafters.kv import CacheRows
from draft_service.drafters.models import DraftModel, HeadModel, LanguageModel, Tips
from engine.batch import Segment
from engine.execution import GraphSizes
from engine.models.heads.runner import HeadRunner
from engine.runner import ModelRunner
from kernels.attention.triton_blocks import Heads
from outrider.tree import ROOT
from tests.engine.heads.test_graphs import MAX_LEN, NUM_SLOTS, build, counted, put_in_buckets
from tests.engine.tiny import save_model
from tests.kernels.interpreted import kernel_device, run_under_the_interpreter

SESSIONS, ROWS, NUM_TOP = 3, 9, 8
SHAPES = [(1, 1, 1), (3, 1, 3), (1, 4, 4), (5, 4, 7), (5, 4, 60), (7, 3, 11), (2, 8, 30), (10, 8, 40)]
HEADS = ("eagle", "eagle3", "mimo")


def head_runner(family: str, folder: Path, device: str = "cpu") -> HeadRunner:
    return build(family, folder, device, attention="torch_native")


def head_model(family: str, folder: Path, device: str = "cpu") -> HeadModel:
    return HeadModel(head_runner(family, folder, device), NUM_SLOTS, max_batch_tokens=NUM_SLOTS)


def language_model(folder: Path) -> LanguageModel:
    save_model("qwen3", folder)
    runner = ModelRunner.load(folder, dtype="float32", num_slots=NUM_SLOTS, max_sessions=SESSIONS, max_len=MAX_LEN)
    assert runner.takes_device_rows
    return LanguageModel(runner, NUM_SLOTS, max_batch_tokens=NUM_SLOTS)


@pytest.fixture(params=[*HEADS, "language model"])
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DraftModel:
    monkeypatch.setenv("OUTRIDER_CPU_KERNEL", "0")
    if request.param == "language model":
        return language_model(tmp_path)
    return head_model(request.param, tmp_path)


def opened(model: DraftModel) -> tuple[list[CacheRows], Tips]:
    """Sequences of several lengths, and what may follow them."""
    rng, generator = np.random.default_rng(1), torch.Generator().manual_seed(1)
    sequences, segments, states = [], [], None
    for count in range(ROWS, ROWS + SESSIONS):
        sequences.append(model.cache.open())
        tokens = rng.integers(3, 60, count).astype(np.int32)
        segments.append(Segment(sequences[-1].table_row, 0, tokens, model.cache.append(sequences[-1], count)))
    if isinstance(model, HeadModel):
        rows = sum(len(segment.tokens) for segment in segments)
        states = model.fuse(torch.randn(rows, model.feature_width, generator=generator))
    return sequences, model.run(segments, states, NUM_TOP)


def grown(model: DraftModel, *, apart: bool, num_nodes: int, **shape: Any) -> list[Draft]:
    """Trees of `num_nodes` nodes each, grown apart from the host or with it; nothing of them stays in the cache."""
    model.runs_apart = apart  # type: ignore[misc]
    sequences, tips = opened(model)
    before, wanted = model.cache.num_free, [num_nodes + extra for extra in range(SESSIONS)]
    drafts = grow(model, sequences, tips, num_nodes=wanted, **shape)
    assert model.cache.num_free == before
    for sequence in reversed(sequences):
        model.cache.close(sequence)
    return drafts


def assert_same(ours: list[Draft], theirs: list[Draft]) -> None:
    for draft, reference in zip(ours, theirs, strict=True):
        assert draft.grown == reference.grown
        for name in ("tokens", "parents"):
            found, expected = getattr(draft, name), getattr(reference, name)
            assert found.dtype == expected.dtype
            assert found.tolist() == expected.tolist()
        np.testing.assert_allclose(draft.probabilities, reference.probabilities, rtol=1e-4)
        states, wanted = (cast("Carried | None", each.memo) for each in (draft, reference))
        assert (states is None) == (wanted is None)
        if states is None or wanted is None:
            continue
        assert states.entries.tolist() == wanted.entries.tolist()
        run = [ROOT, *np.flatnonzero(states.entries >= 0).tolist()]
        mine, other = states.rows(run), wanted.rows(run)
        assert mine is not None
        assert other is not None
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("num_steps", "topk", "num_nodes"), SHAPES)
def test_the_same_trees(model: DraftModel, num_steps: int, topk: int, num_nodes: int) -> None:
    shape: dict[str, Any] = {"num_steps": num_steps, "topk": topk, "num_nodes": num_nodes}
    assert_same(*(grown(model, apart=apart, **shape) for apart in (True, False)))


@pytest.mark.parametrize("topk", [1, 4])
def test_the_host_waits_once(model: DraftModel, topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many steps there are: nothing is read in between."""
    model.runs_apart = True  # type: ignore[misc]
    sequences, tips = opened(model)
    reads: list[str] = []
    for name in ("cpu", "numpy", "item", "tolist", "__bool__", "__int__", "__float__", "__index__"):
        whole = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor, *args: Any, name: str = name, whole: Any = whole) -> Any:
            reads.append(name)
            return whole(tensor, *args)

        monkeypatch.setattr(torch.Tensor, name, read)
    grow(model, sequences, tips, num_steps=5, topk=topk, num_nodes=[8] * SESSIONS)
    assert reads == ["cpu", "numpy"]


@pytest.mark.parametrize("topk", [1, 4])
def test_what_is_asked_before_each_step_may_end_it(model: DraftModel, topk: int) -> None:
    class End(Exception):
        pass

    asked: list[None] = []

    def check() -> None:
        asked.append(None)
        if len(asked) == 2:
            raise End

    model.runs_apart = True  # type: ignore[misc]
    sequences, tips = opened(model)
    before = model.cache.num_free
    with pytest.raises(End):
        grow(model, sequences, tips, num_steps=5, topk=topk, num_nodes=[8] * SESSIONS, check=check)
    assert model.cache.num_free == before
    assert len(asked) == 2


@pytest.mark.parametrize(("num_steps", "topk", "num_nodes"), [(4, 1, 4), (4, 2, 7), (3, 4, 20)])
def test_in_graphs(num_steps: int, topk: int, num_nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows go to the places that graphs share, whatever the host wrote there."""
    monkeypatch.setenv("OUTRIDER_CPU_KERNEL", "0")
    runner = head_runner("eagle3", tmp_path)
    put_in_buckets(runner, counted([]), GraphSizes(max_batch=4, max_rows=12, last_logits=4))
    model = HeadModel(runner, NUM_SLOTS, max_batch_tokens=NUM_SLOTS)
    shape: dict[str, Any] = {"num_steps": num_steps, "topk": topk, "num_nodes": num_nodes}
    assert_same(*(grown(model, apart=apart, **shape) for apart in (True, False)))


def test_under_the_interpreter() -> None:
    run_under_the_interpreter(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("num_steps", "topk", "num_nodes"), [(3, 1, 3), (4, 3, 9)])
def test_on_tritons_kernels(num_steps: int, topk: int, num_nodes: int, graphs: bool, tmp_path: Path) -> None:
    """Who sees whom goes to the kernels in place of what the step was packed with."""
    device = kernel_device()
    from kernels.attention.triton import TritonAttention

    plain = head_model("eagle3", tmp_path / "plain", str(device))
    runner = head_runner("eagle3", tmp_path / "triton", str(device))
    attention, block = TritonAttention(device), runner.head.config.block
    runner._attention = attention
    if graphs:
        heads = Heads(block.num_heads, block.num_kv_heads, block.head_dim, runner.head.dtype)
        sizes = GraphSizes(max_batch=4, max_rows=12, last_logits=4)
        put_in_buckets(runner, lambda layout, bucket: attention.prepare(layout, heads, bucket), sizes)
    shape: dict[str, Any] = {"num_steps": num_steps, "topk": topk, "num_nodes": num_nodes}
    ours = grown(HeadModel(runner, NUM_SLOTS, max_batch_tokens=NUM_SLOTS), apart=True, **shape)
    assert_same(ours, grown(plain, apart=False, **shape))
