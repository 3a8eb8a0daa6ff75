"""Whole trees in one graph: the same, node for node, as those grown step by step, in whatever place they grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draft_service.drafters.growing import grow
from draft_service.drafters.growing_graphs import TreeGraphs, TreeSizes
from draft_service.drafters.models import HeadModel
from engine.execution import GraphSizes
from engine.models.heads.runner import HeadRunner
from kernels.attention.triton_blocks import Heads
from tests.draft_service.test_device_growth import NUM_SLOTS, NUM_TOP, SESSIONS, assert_same, grown, head_model, opened
from tests.engine.heads.test_graphs import build, counted, put_in_buckets
from tests.kernels.interpreted import kernel_device, run_under_the_interpreter

HEADS = ("eagle", "eagle3", "mimo")
SHAPES = [(2, 1, 2), (3, 1, 3), (5, 4, 7), (5, 4, 60), (4, 4, 11), (5, 1, 9)]


def graphed(runner: HeadRunner, max_trees: int = 8, max_rows: int = 512) -> HeadModel:
    return HeadModel(
        runner, NUM_SLOTS, max_batch_tokens=NUM_SLOTS, graphs=TreeSizes((1, 2, 3, 4, 5), 4, max_trees, max_rows)
    )


def eager(family: str, folder: Path, **options: Any) -> HeadModel:
    """A model whose graphs are run as they were captured."""
    runner = build(family, folder, attention="torch_native")
    put_in_buckets(runner, counted([]), GraphSizes(max_batch=4, max_rows=16, last_logits=4))
    return graphed(runner, **options)


@torch.inference_mode()
def poison(graphs: TreeGraphs | None) -> None:
    """Nothing that earlier trees left behind may reach a later one."""
    assert graphs is not None
    for growth in graphs._growths.values():
        trees = growth._trees
        for places in (trees.states, trees.inputs, trees.reach, growth._chances):
            places[:] = torch.nan
        trees.tokens[:], growth._words[:], trees.found[:], trees.bits[:] = 1, 1, -1, -1


@pytest.mark.parametrize("family", HEADS)
@pytest.mark.parametrize(("num_steps", "topk", "num_nodes"), SHAPES)
def test_the_same_trees(
    family: str, num_steps: int, topk: int, num_nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CPU_KERNEL", "0")
    shape: dict[str, Any] = {"num_steps": num_steps, "topk": topk, "num_nodes": num_nodes}
    model = eager(family, tmp_path / "graphed")
    poison(model.trees)
    reference = grown(head_model(family, tmp_path / "plain"), apart=False, **shape)
    assert_same(grown(model, apart=True, **shape), reference)
    assert_same(grown(model, apart=True, **shape), reference)


def test_more_entries_than_a_word_has_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CPU_KERNEL", "0")
    runner = build("eagle3", tmp_path / "graphed", attention="torch_native")
    put_in_buckets(runner, counted([]), GraphSizes(max_batch=4, max_rows=16, last_logits=4))
    model = HeadModel(
        runner, NUM_SLOTS, max_batch_tokens=NUM_SLOTS, graphs=TreeSizes((12,), 8, max_trees=SESSIONS)
    )  # fmt: skip
    assert model.trees is not None
    assert model.trees.find(12, 8, SESSIONS) is not None
    poison(model.trees)
    shape: dict[str, Any] = {"num_steps": 12, "topk": 8, "num_nodes": 60}
    assert_same(
        grown(model, apart=True, **shape), grown(head_model("eagle3", tmp_path / "plain"), apart=False, **shape)
    )


@pytest.mark.parametrize(("num_steps", "topk"), [(6, 4), (1, 4), (4, 3)])
def test_what_no_graph_holds_grows_step_by_step(
    num_steps: int, topk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CPU_KERNEL", "0")
    model = eager("eagle3", tmp_path / "graphed")
    assert model.trees is not None
    assert model.trees.find(num_steps, topk, 3) is None
    assert model.trees.find(4, 4, 9) is None
    shape: dict[str, Any] = {"num_steps": num_steps, "topk": topk, "num_nodes": 7}
    assert_same(
        grown(model, apart=True, **shape), grown(head_model("eagle3", tmp_path / "plain"), apart=False, **shape)
    )


def test_graphs_are_for_as_many_as_there_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CPU_KERNEL", "0")
    trees = eager("eagle3", tmp_path, max_trees=3, max_rows=48).trees
    assert trees is not None
    assert trees.find(4, 4, 3) is not None
    assert trees.find(4, 4, 5) is None
    assert trees.find(5, 4, 2) is not None
    assert trees.find(5, 4, 3) is None  # 64 rows


def test_a_smaller_vocabulary_of_the_target_has_no_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CPU_KERNEL", "0")
    model = eager("eagle", tmp_path)
    model.limit_vocabulary(model.num_drafted - 1)
    assert model.trees is None


def test_the_host_waits_once_and_no_step_asks_it_for_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CPU_KERNEL", "0")
    model = eager("eagle3", tmp_path)
    model.runs_apart = True
    sequences, tips = opened(model)
    reads: list[str] = []
    for name in ("cpu", "item", "tolist", "__bool__", "__int__", "__float__", "__index__"):
        whole = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor, *args: Any, name: str = name, whole: Any = whole) -> Any:
            reads.append(name)
            return whole(tensor, *args)

        monkeypatch.setattr(torch.Tensor, name, read)
    grow(model, sequences, tips, num_steps=5, topk=4, num_nodes=[8] * len(sequences), num_top=NUM_TOP)
    assert reads == ["cpu"]


def test_what_is_asked_before_may_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class End(Exception):
        pass

    def check() -> None:
        raise End

    monkeypatch.setenv("OUTRIDER_CPU_KERNEL", "0")
    model = eager("eagle3", tmp_path)
    model.runs_apart = True
    sequences, tips = opened(model)
    before = model.cache.num_free
    with pytest.raises(End):
        grow(model, sequences, tips, num_steps=5, topk=4, num_nodes=[8] * len(sequences), check=check)
    assert model.cache.num_free == before


def test_under_the_interpreter() -> None:
    run_under_the_interpreter(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_steps", "topk", "num_nodes"), [(3, 1, 3), (4, 4, 9)])
def test_on_tritons_kernels(
    num_steps: int, topk: int, num_nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who sees whom is told to the kernels between steps; all that a GPU has kernels for is done by them."""
    device = kernel_device()
    from kernels.attention.triton import TritonAttention
    from kernels.attention.triton_rope import rope_and_store

    shape: dict[str, Any] = {"num_steps": num_steps, "topk": topk, "num_nodes": num_nodes}
    reference = grown(head_model("eagle3", tmp_path / "plain", str(device)), apart=False, **shape)
    runner = build("eagle3", tmp_path / "triton", str(device), attention="torch_native")
    attention, block = TritonAttention(device), runner.head.config.block
    runner._attention = attention
    heads = Heads(block.num_heads, block.num_kv_heads, block.head_dim, runner.head.dtype)
    put_in_buckets(
        runner, lambda layout, bucket: attention.prepare(layout, heads, bucket), GraphSizes(1, 1, 1),
        see=lambda layout, bits: attention.see(bits),
    )  # fmt: skip
    model = HeadModel(runner, NUM_SLOTS, max_batch_tokens=NUM_SLOTS, graphs=TreeSizes((num_steps,), topk, max_trees=4))
    poison(model.trees)
    runner._rope_and_store = rope_and_store  # not before, as the interpreter is slow
    for module in ("likeliest", "tree_growth"):
        monkeypatch.setattr(f"kernels.{module}.has_triton", lambda device: True)
    assert_same(grown(model, apart=True, **shape), reference)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", HEADS)
@pytest.mark.parametrize(("num_steps", "topk", "num_nodes"), [(2, 1, 2), (5, 4, 7), (5, 1, 5)])
def test_replayed(family: str, num_steps: int, topk: int, num_nodes: int, tmp_path: Path) -> None:
    sizes = GraphSizes(max_batch=4, max_rows=16, last_logits=4)
    model = graphed(build(family, tmp_path / "captured", "cuda", attention="triton", graphs=sizes))
    assert model.trees is not None
    shape: dict[str, Any] = {"num_steps": num_steps, "topk": topk, "num_nodes": num_nodes}
    reference = grown(head_model(family, tmp_path / "plain", "cuda"), apart=False, **shape)
    other: dict[str, Any] = {"num_steps": 4, "topk": 4, "num_nodes": 9}
    for _ in range(3):
        poison(model.trees)
        assert_same(grown(model, apart=True, **shape), reference)
        grown(model, apart=True, **other)
