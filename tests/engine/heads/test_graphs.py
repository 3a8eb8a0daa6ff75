"""Draft heads in buckets: padded steps, run eagerly from the places that graphs share, give what plain steps give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import Segment
from engine.execution import GraphSizes
from engine.feature_spec import FeatureSpec
from engine.graphs import Capturing, Prepare, See
from engine.kv_pool import KVPool
from engine.models.heads.graphs import GraphedHead
from engine.models.heads.load import load_head
from engine.models.heads.runner import HeadRunner
from kernels.attention.layout import AttentionLayout
from kernels.attention.triton_blocks import Heads
from kernels.attention.triton_plan import Bucket
from kernels.likeliest import likeliest
from kernels.rope import apply_rope
from outrider.errors import StartupError
from tests.engine.heads import make
from tests.engine.heads.make import VOCAB, Written
from tests.engine.tiny import Session, sessions
from tests.kernels.attention_cases import random_tree
from tests.kernels.interpreted import kernel_device, run_under_the_interpreter

SIZES = GraphSizes(max_batch=3, max_rows=6, last_logits=2)
NUM_SLOTS, MAX_LEN = 300, 64
MAKE: dict[str, Callable[[Path, Written], Written]] = {
    "eagle": lambda folder, target: make.eagle(folder, layers=2),
    "eagle3": lambda folder, target: make.eagle3(folder, norm_output=True),
    "mimo": lambda folder, target: make.add_mimo(target),
    "multi-layer": lambda folder, target: make.add_multi_layer(target),
}


def build(family: str, folder: Path, device: str = "cpu", **options: Any) -> HeadRunner:
    target = make.write_target(folder / "target")
    head, _ = load_head(
        MAKE[family](folder / "head", target).folder, target.folder, max_len=MAX_LEN, device=torch.device(device)
    )
    return HeadRunner(head, num_slots=NUM_SLOTS, max_sessions=3, **options)


def three(runner: HeadRunner, seed: int = 0) -> list[Session]:
    """Sessions, which need no more of a runner than both kinds have."""
    return sessions(runner, 3, seed)  # type: ignore[arg-type]


def put_in_buckets(runner: HeadRunner, prepare: Prepare, sizes: GraphSizes = SIZES, see: See | None = None) -> None:
    """Has the runner's steps go to eager graphs from now on."""
    head = runner.head
    runner.pool = KVPool(head.config.block, FeatureSpec(), NUM_SLOTS, head.dtype, head.device, with_padding=True)
    runner.capturing = Capturing(prepare, see or AttentionLayout.see, lambda step: step, NUM_SLOTS)
    graphs = GraphedHead(head, runner.run, sizes, runner.capturing)
    graphs.capture()
    runner._graphs = graphs


def counted(used: list[Bucket]) -> Callable[[AttentionLayout, Bucket], None]:
    def prepare(layout: AttentionLayout, bucket: Bucket) -> None:
        bucket.check(layout)
        used.append(bucket)

    return prepare


def drafted(runner: HeadRunner, seed: int, num_steps: int = 6) -> list[torch.Tensor]:
    """Logits and carried states of some steps: chains, trees, and what verdicts bring, several sessions at a time."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    everyone = three(runner, seed)
    found: list[torch.Tensor] = []
    device, hidden = runner.head.device, runner.head.config.block.hidden_size

    def step(segments: list[Segment], stage: int) -> None:
        count = sum(len(segment.tokens) for segment in segments)
        states = torch.randn((count, hidden), generator=generator).to(device, runner.head.dtype)
        made = runner.forward(segments, states, stage)
        found.extend(tensor.cpu().clone() for tensor in (made.logits, made.carried))

    step([s.segment(rng.integers(0, VOCAB, 9).tolist(), 0) for s in everyone], 0)
    for index in range(num_steps):
        if runner._graphs is not None and device.type == "cpu":
            # Nothing that lies in rows or the slot of padding may reach a row that is wanted.
            runner.pool.k[:, NUM_SLOTS] = runner.pool.v[:, NUM_SLOTS] = runner._graphs._states[:] = torch.nan
        segments = []
        for session in everyone[: 1 + index % 3]:
            tokens = rng.integers(0, VOCAB, int(rng.integers(2, 7))).tolist()
            kind = rng.choice(["chain", "tree", "verdict"])
            if kind == "tree":
                segments.append(session.tree(tokens, random_tree(rng, len(tokens))))
                segments[-1].num_logits = 2
            else:
                segments.append(session.segment(tokens[:1] if kind == "chain" else tokens, int(rng.integers(0, 2))))
        step(segments, index % runner.head.num_stages)
    return found


@pytest.mark.parametrize("family", MAKE)
@pytest.mark.parametrize("seed", range(3))
def test_a_padded_step_gives_what_a_plain_one_gives(tmp_path: Path, family: str, seed: int) -> None:
    used: list[Bucket] = []
    plain, padded = (build(family, tmp_path / name, attention="torch_native") for name in ("plain", "padded"))
    put_in_buckets(padded, counted(used))
    used.clear()
    outputs = drafted(padded, seed), drafted(plain, seed)
    for mine, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)
    assert len(used) == 6  # prompts are longer than any bucket
    for mine, theirs in ((padded.pool.k, plain.pool.k), (padded.pool.v, plain.pool.v)):
        torch.testing.assert_close(mine[:, :NUM_SLOTS], theirs, atol=1e-4, rtol=0)


def test_one_kernel_rotates_and_stores_where_there_is_one(tmp_path: Path) -> None:
    used: list[int] = []

    def rope_and_store(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: torch.Tensor, *at: Any) -> torch.Tensor:
        keys, values, slots = at
        used.append(len(q))
        keys[slots], values[slots] = apply_rope(k, rope), v
        return apply_rope(q, rope)

    plain, fused = (build("eagle", tmp_path / name, attention="torch_native") for name in ("plain", "fused"))
    fused._rope_and_store = rope_and_store
    for mine, theirs in zip(drafted(fused, 1, 2), drafted(plain, 1, 2), strict=True):
        assert torch.equal(mine, theirs)
    assert len(used) == 3 * 2  # steps of two layers


def test_what_is_carried_on_outlives_the_next_step(tmp_path: Path) -> None:
    runner = build("eagle", tmp_path, attention="torch_native")
    put_in_buckets(runner, counted([]))
    session, hidden = three(runner)[0], runner.head.config.block.hidden_size
    first = runner.forward([session.segment([1])], torch.ones(1, hidden))
    kept = first.carried.clone()
    runner.forward([session.segment([2])], -torch.ones(1, hidden))
    assert torch.equal(first.carried, kept)


def test_the_likeliest_are_found_with_the_step(tmp_path: Path) -> None:
    runner = build("eagle3", tmp_path, attention="torch_native")
    put_in_buckets(runner, counted([]))
    session, hidden = three(runner)[0], runner.head.config.block.hidden_size
    step = runner.forward([session.segment([1])], torch.ones(1, hidden))
    assert step.top is not None
    chances, ids = likeliest(step.logits, step.top[0].shape[1])
    kept = step.top[0].clone()
    torch.testing.assert_close(kept, chances)
    assert torch.equal(step.top[1], ids)
    runner.forward([session.segment([2])], -torch.ones(1, hidden))
    assert torch.equal(step.top[0], kept)


def test_a_step_goes_where_its_logits_fit(tmp_path: Path) -> None:
    used: list[Bucket] = []
    runner = build("eagle", tmp_path, attention="torch_native")
    put_in_buckets(runner, counted(used))
    used.clear()
    session, hidden = three(runner)[0], runner.head.config.block.hidden_size
    for num_logits, num_used in ((2, 1), (1, 2), (0, 3)):
        step = runner.forward([session.segment([1, 2, 3, 4], num_logits)], torch.ones(4, hidden))
        assert len(step.logits) == len(step.carried) == num_logits
        assert (used[-1].num_segments, used[-1].rows_per_segment) == (1, 4)
        assert len(used) == num_used
    wide = runner.forward([session.segment([1, 2, 3, 4, 5, 6], 6)], torch.ones(6, hidden))
    assert len(wide.logits) == 6
    # So many fit the bucket of three sessions only.
    assert [bucket.num_segments for bucket in used[3:]] == [3]


def test_graphs_that_cannot_be_are_refused_where_they_are_required(tmp_path: Path) -> None:
    for attention in ("auto", "torch_native"):
        assert build("eagle", tmp_path / attention, attention=attention, graphs=SIZES)._graphs is None
    with pytest.raises(StartupError, match=r"--cuda-graph-max-bs is given, but .* the device is cpu"):
        build("eagle", tmp_path / "required", graphs=GraphSizes(2, 2, required=True))


def test_under_the_interpreter() -> None:
    run_under_the_interpreter(__file__)


@pytest.mark.gpu
def test_padded_steps_on_tritons_kernels(tmp_path: Path) -> None:
    device = kernel_device()
    from kernels.attention.triton import TritonAttention
    from kernels.attention.triton_rope import rope_and_store

    plain, padded = (build("eagle3", tmp_path / name, str(device), attention="torch_native") for name in "ab")
    attention, block = TritonAttention(device), padded.head.config.block
    padded._attention = attention
    heads = Heads(block.num_heads, block.num_kv_heads, block.head_dim, padded.head.dtype)
    put_in_buckets(padded, lambda layout, bucket: attention.prepare(layout, heads, bucket), GraphSizes(2, 4, 2))
    padded._rope_and_store = rope_and_store  # not before, as the interpreter is slow
    for mine, theirs in zip(drafted(padded, 2, 3), drafted(plain, 2, 3), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", MAKE)
def test_replayed_graphs_give_what_plain_launches_give(tmp_path: Path, family: str) -> None:
    plain = build(family, tmp_path / "plain", "cuda", attention="triton")
    captured = build(family, tmp_path / "captured", "cuda", attention="triton", graphs=SIZES)
    assert captured._graphs is not None
    for mine, theirs in zip(drafted(captured, 1), drafted(plain, 1), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)
