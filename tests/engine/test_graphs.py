"""Steps in buckets: padded steps, run eagerly from the places that graphs share, give what plain steps give."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.attention import AttentionChoice
from engine.batch import BatchBuffers, Segment
from engine.config import ModelConfig
from engine.execution import Execution, GraphSizes
from engine.feature_spec import FeatureSpec
from engine.graphs import MAX_ROWS, Capturing, CudaCapture, GraphedDecoder, bucket_sizes, usable_sizes
from engine.kv_pool import KVPool
from engine.loader import load_checkpoint
from engine.models.llama import TorchLlama
from engine.models.llama_weights import LlamaWeights, tensor_shapes
from engine.runner import Decoder, ModelRunner
from kernels.attention import torch_native
from kernels.attention.layout import AttentionLayout
from kernels.attention.triton_plan import Bucket
from outrider.errors import StartupError
from tests.engine.tiny import VOCAB_SIZE, Session, saved_model, sessions
from tests.kernels.attention_cases import random_tree

CPU = torch.device("cpu")
SIZES = GraphSizes(max_batch=4, max_rows=6)
NUM_SLOTS, MAX_LEN = 400, 64

folder = saved_model("qwen3")


def build(folder: Path, wrap: Callable[[TorchLlama], Decoder] = lambda decoder: decoder) -> ModelRunner:
    """A runner over the torch decoder, wrapped; its pool has a slot for padding."""
    config, features = ModelConfig.from_folder(folder), FeatureSpec.parse("aux:1,3")
    _, tensors = load_checkpoint(folder, tensor_shapes(config))
    pool = KVPool(config, features, NUM_SLOTS, torch.float32, CPU, with_padding=True)
    weights = LlamaWeights(config, tensors, torch.float32, CPU)
    decoder = TorchLlama(config, weights, pool, features, torch_native.attention, MAX_LEN)
    table = np.zeros((4, MAX_LEN), np.int32)
    buffers = BatchBuffers(table, vocab_size=VOCAB_SIZE, num_slots=NUM_SLOTS, num_positions=MAX_LEN, max_tokens=99)
    return ModelRunner(
        config, wrap(decoder), pool, table, buffers, dtype=torch.float32, device=CPU, model_path=folder, backend="",
        numerics="",
    )  # fmt: skip


def graphed(seen: list[Bucket], sizes: GraphSizes = SIZES) -> Callable[[TorchLlama], Decoder]:
    """Wraps a decoder in eager graphs; the buckets that steps went to are added to `seen`."""

    def wrap(decoder: TorchLlama) -> Decoder:
        def prepare(layout: AttentionLayout, bucket: Bucket) -> None:
            bucket.check(layout)
            seen.append(bucket)

        whole = GraphedDecoder(
            decoder, sizes, Capturing(prepare, AttentionLayout.see, lambda step: step, NUM_SLOTS),
            num_outputs=VOCAB_SIZE, max_len=MAX_LEN, device=CPU,
        )  # fmt: skip
        whole.capture()
        assert [bucket.num_rows for bucket in seen] == sorted((b.num_rows for b in seen), reverse=True)
        seen.clear()
        return whole

    return wrap


def some_step(rng: np.random.Generator, group: Sequence[Session]) -> list[Segment]:
    """What a few sessions do next: one token, a tree, or a chunk all of whose logits are wanted."""
    segments = []
    for session in group:
        tokens = rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 7))).tolist()
        kind = rng.choice(["token", "tree", "chunk"])
        if kind == "tree":
            segments.append(session.tree(tokens, random_tree(rng, len(tokens))))
        else:
            segments.append(session.segment(tokens if kind == "chunk" else tokens[:1]))
    return segments


@pytest.mark.parametrize("seed", range(6))
def test_a_padded_step_gives_what_a_plain_one_gives(folder: Path, seed: int) -> None:
    used: list[Bucket] = []
    padded, plain = build(folder, graphed(used)), build(folder)
    outputs = []
    for runner in (padded, plain):
        rng = np.random.default_rng(seed)
        everyone = sessions(runner, 4, seed)
        for session in everyone:
            runner.forward([session.segment(rng.integers(0, VOCAB_SIZE, 9).tolist(), 0)])
        logits = []
        for _ in range(5):
            # Nothing that lies in the slot of padding may reach a row.
            runner.pool.k[:, NUM_SLOTS] = runner.pool.v[:, NUM_SLOTS] = torch.nan
            group = [everyone[i] for i in sorted(rng.permutation(4)[: int(rng.integers(1, 5))])]
            logits.append(runner.forward(some_step(rng, group)).clone())
        outputs.append(logits)
    for mine, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)
    assert len(used) == 5  # of prompts' chunks no logits were wanted: they went without
    for mine, theirs in ((padded.pool.k, plain.pool.k), (padded.pool.v, plain.pool.v)):
        torch.testing.assert_close(mine[:, :NUM_SLOTS], theirs[:, :NUM_SLOTS], atol=1e-4, rtol=0)
    assert padded.features is not None
    assert plain.features is not None
    torch.testing.assert_close(padded.features[:NUM_SLOTS], plain.features[:NUM_SLOTS], atol=3e-4, rtol=0)


def test_a_step_goes_to_the_smallest_bucket_that_holds_it(folder: Path) -> None:
    used: list[Bucket] = []
    runner = build(folder, graphed(used))
    one, two, three, four = sessions(runner, 4)
    for segments, expected in (
        ([one.segment([1])], (1, 1)),
        ([one.segment([1]), two.segment([2]), three.segment([3])], (4, 1)),
        ([one.tree([1, 2, 3], [-1, 0, 0])], (1, 4)),
        ([one.tree([1], [-1])], (1, 2)),  # a tree of a root alone: only buckets for trees know masks
        ([one.tree([1] * 6, [-1, 0, 1, 2, 3, 4]), four.segment([2])], (2, 6)),
        ([one.segment([1, 2, 3])], (1, 4)),
    ):
        runner.forward(segments)
        assert (used[-1].num_segments, used[-1].rows_per_segment) == expected
    count = len(used)
    runner.forward([one.segment([5] * 7)])  # longer than any
    runner.forward([one.segment([5, 6], 1), two.segment([7])])  # a chunk of a prompt
    assert len(used) == count


def test_a_drafters_steps_give_the_logits_of_last_rows(folder: Path) -> None:
    used: list[Bucket] = []
    padded = build(folder, graphed(used, GraphSizes(max_batch=4, max_rows=6, last_logits=2)))
    outputs = []
    for runner in (padded, build(folder)):
        rng = np.random.default_rng(3)
        everyone, logits = sessions(runner, 4, 3), []
        for count in (1, 2, 3, 4):
            segments = some_step(rng, everyone[:count])
            for segment in segments:
                # As a growing tree's newest nodes, a verdict's last row, or a backlog's piece that is not the last.
                segment.num_logits = min(len(segment.tokens), int(rng.integers(0, 3)))
            logits.append(runner.forward(segments).clone())
        logits.append(runner.forward([everyone[0].segment([1, 2, 3, 4], 4)]).clone())
        outputs.append(logits)
    for mine, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)
    assert len(used) == 5
    # Four logits of one session: the bucket of two gives as many.
    assert (used[-1].num_segments, used[-1].rows_per_segment) == (2, 4)


def test_one_long_session_among_short_ones_is_not_padded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Bucket] = []
    runner = build(folder, graphed(used))
    everyone = sessions(runner, 4, 3)
    segments = [session.segment([5] * (6 if row == 0 else 1)) for row, session in enumerate(everyone)]
    for few_rows, most_padding in ((128, 1), (1, 4)):  # the graph's 24 rows are few, or no more than four times nine
        monkeypatch.setattr("engine.graphs._FEW_ROWS", few_rows)
        monkeypatch.setattr("engine.graphs._MOST_PADDING", most_padding)
        runner.forward(segments)
    assert len(used) == 2
    monkeypatch.setattr("engine.graphs._MOST_PADDING", 2)
    runner.forward(segments)
    assert len(used) == 2


def test_the_buckets() -> None:
    sizes = {(b.num_segments, b.rows_per_segment) for b in bucket_sizes(GraphSizes(20, 33), 100)}
    assert {batch for batch, _ in sizes} == {1, 2, 4, 8, 16, 20}
    assert {rows for batch, rows in sizes if batch == 8} == {1, 2, 4, 8, 16, 32, 33}
    assert max(batch * rows for batch, rows in sizes) <= MAX_ROWS
    assert {(b.num_segments, b.rows_per_segment) for b in bucket_sizes(GraphSizes(1, 1), 100)} == {(1, 1)}
    assert {(b.num_segments, b.has_masks) for b in bucket_sizes(GraphSizes(8, 2), 9) if b.num_segments == 8} == {
        (8, False),
        (8, True),
    }


@pytest.mark.parametrize("backend", ["auto", "torch_native"])
def test_where_there_can_be_no_graphs(backend: str) -> None:
    def execution(*, required: bool) -> Execution:
        return Execution(AttentionChoice(backend), graphs=GraphSizes(8, 2, required=required))

    assert usable_sizes(execution(required=False), CPU) is None
    with pytest.raises(StartupError, match=r"--cuda-graph-max-bs is given, but .* the device is cpu"):
        usable_sizes(execution(required=True), CPU)


def test_graphs_are_for_tritons_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, sizes = torch.device("cuda"), GraphSizes(8, 2, required=True)
    assert usable_sizes(Execution(AttentionChoice("triton"), graphs=sizes), cuda) == sizes
    assert usable_sizes(Execution(AttentionChoice("triton")), cuda) is None
    with pytest.raises(StartupError, match="attention is torch_native"):
        usable_sizes(Execution(AttentionChoice("torch_native"), graphs=sizes), cuda)
    with pytest.raises(StartupError, match="triton"):
        usable_sizes(Execution(AttentionChoice("triton", decode="flashinfer"), graphs=sizes), cuda)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("verify", ["prefill", "decode"])
def test_replayed_graphs_give_what_plain_launches_give(folder: Path, verify: str) -> None:
    outputs = []
    for sizes in (None, SIZES):
        execution = Execution(AttentionChoice("triton", verify=verify), graphs=sizes)  # type: ignore[arg-type]
        runner = ModelRunner.load(
            folder, dtype="float32", device="cuda", num_slots=NUM_SLOTS, max_sessions=4, max_len=MAX_LEN,
            execution=execution,
        )  # fmt: skip
        rng = np.random.default_rng(1)
        everyone = sessions(runner, 4, 1)
        for session in everyone:
            runner.forward([session.segment(rng.integers(0, VOCAB_SIZE, 9).tolist(), 0)])
        outputs.append([runner.forward(some_step(rng, everyone)).cpu() for _ in range(6)])
    for mine, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


def test_steps_are_captured_on_the_device_that_they_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch captures on whichever device captured first, where it is not told: a drafter may have one of its own."""
    streams: list[object] = []

    @contextlib.contextmanager
    def capture(graph: object, *, stream: object, **rest: object) -> Generator[None]:
        streams.append(stream)
        yield

    cuda = SimpleNamespace(
        graph_pool_handle=lambda: 0, Stream=lambda device: f"on {device}", synchronize=lambda: None, graph=capture,
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: None),
    )  # fmt: skip
    monkeypatch.setattr(torch, "cuda", cuda)
    for device in ("cuda:0", "cuda:1"):
        CudaCapture(torch.device(device))(lambda: None)
    assert streams == ["on cuda:0", "on cuda:1"]
