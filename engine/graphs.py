"""CUDA graphs: a step of few rows is hundreds of small launches; captured once, they are replayed as one.

A graph's shapes and addresses are fixed, so there is one for each bucket, (sessions, rows of the longest session): a
step goes to the smallest that holds it, its rows copied to the places that all graphs share, and what it lacks is
filled with rows of padding, which write to a slot of their own and whose logits nobody reads. Plain decode has buckets
of one row, verification of trees those of more; a step with a chunk of a prompt runs without a graph. A drafter's
graphs give logits of each session's last rows only: of a tree's newest nodes, of the last row that a verdict brought.

What is captured, and how, is handed in: tests run the same padded steps on CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from engine.batch import Batch
from engine.execution import Execution, GraphSizes
from engine.kv_pool import KVPool
from engine.models.llama import StepRows, TorchLlama
from engine.progress import Progress
from kernels.attention.layout import AttentionLayout
from kernels.attention.triton_blocks import Heads
from kernels.attention.triton_plan import Bucket
from kernels.transfer import send
from outrider.errors import StartupError
from outrider.telemetry import get_logger

# Beyond, a step computes for so long that launches are no longer what it waits for.
MAX_ROWS = 512
# Sessions: SGLang's sizes.
_SMALL_BATCHES, _BATCH_STEP = (1, 2, 4), 8
# A graph's rows for each that is wanted, of more rows than weights are read for anyway: one long session among many
# short ones is better off without.
_MOST_PADDING, _FEW_ROWS = 4, 128

log = get_logger(__name__)

Step = Callable[[], None]
Replay = Callable[[], object]


class Capturable(Protocol):
    """A decoder whose steps can be captured (engine.models.llama.TorchLlama)."""

    def forward(self, batch: Batch) -> torch.Tensor: ...

    def timed_forward(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]: ...

    def run(self, rows: StepRows, layout: AttentionLayout) -> torch.Tensor:
        """Logits [wanted rows, outputs], in any dtype, of rows in place on the device."""
        ...


Compute = Callable[[StepRows, AttentionLayout], None]
"""A step from rows in place on the device to wherever its results belong."""
Prepare = Callable[[AttentionLayout, Bucket], object]
"""Tells attention of a step before its graph is captured or replayed."""
See = Callable[[AttentionLayout, torch.Tensor], object]
"""Tells attention, within a graph, who sees whom from here on (AttentionLayout.row_bits)."""
Capture = Callable[[Step], Replay]
"""Makes a replay of a step that has run before."""


class Capturing(NamedTuple):
    """How steps over one pool are captured: for a model's single steps, and for more than one in one graph."""

    prepare: Prepare
    see: See
    capture: Capture
    padding_slot: int


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured step: its bucket, and how many rows' logits it gives."""

    bucket: Bucket
    num_logits: int
    replay: Replay


class StepGraphs:
    """One computation's graphs for `sizes`, their shared inputs, and the choice among them."""

    def __init__(
        self, compute: Compute, sizes: GraphSizes, capturing: Capturing, *, max_len: int, device: torch.device
    ) -> None:
        self._compute = compute
        self._sizes = sizes
        self._capturing = capturing
        self._buckets = bucket_sizes(sizes, max_len)
        self.num_rows = max(bucket.num_rows for bucket in self._buckets)
        self.num_logits = max(map(self._num_logits, self._buckets))
        # Tokens, positions, slots and rows with logits one behind another, so that one copy takes a step to the device.
        self._inputs = torch.zeros(3 * self.num_rows + self.num_logits, dtype=torch.int32, device=device)
        self._layout = idle_layout(1, capturing.padding_slot)
        self._graphs: list[Graph] = []

    def capture(self) -> None:
        """Captures all graphs, the largest first: later ones then find room in what it took."""
        with Progress("Capturing CUDA graphs", unit="graph") as progress, torch.inference_mode():
            for done, bucket in enumerate(sorted(self._buckets, key=lambda item: item.num_rows, reverse=True)):
                progress.at(done, len(self._buckets))
                self._graphs.append(Graph(bucket, self._num_logits(bucket), self._captured(bucket)))
            progress.at(len(self._buckets), len(self._buckets))
        self._graphs.reverse()

    def find(self, batch: Batch) -> Graph | None:
        """The graph with the fewest rows that holds the step."""
        num_logits = len(batch.logit_rows)
        if not self._sizes.last_logits and num_logits != batch.num_tokens:
            return None
        layout = batch.layout
        count, longest, has_trees = len(layout.num_rows), int(layout.num_rows.max()), (layout.mask_starts >= 0).any()
        for graph in self._graphs:
            bucket = graph.bucket
            if bucket.num_rows > max(_FEW_ROWS, _MOST_PADDING * batch.num_tokens):
                return None
            fits = count <= bucket.num_segments and longest <= bucket.rows_per_segment
            if fits and num_logits <= graph.num_logits and (bucket.has_masks or not has_trees):
                return graph
        return None

    def replay(self, graph: Graph, batch: Batch) -> None:
        """Computes a step that `find` found this graph for."""
        self._layout = batch.layout
        self._fill(batch.tokens, batch.logit_rows, batch.layout, graph.bucket)
        if batch.device_tokens is not None:
            self._inputs[: batch.num_tokens].copy_(batch.device_tokens)
        graph.replay()

    def _num_logits(self, bucket: Bucket) -> int:
        """Rows of logits that a bucket's graph gives."""
        each = bucket.rows_per_segment
        return bucket.num_segments * min(each, self._sizes.last_logits or each)

    def _captured(self, bucket: Bucket) -> Replay:
        num_rows, num_logits = bucket.num_rows, self._num_logits(bucket)
        tokens, positions, slots = self._inputs[: 3 * num_rows].view(3, num_rows)
        # Where only whole steps go to a graph, rows are wanted as they come.
        wanted = self._inputs[3 * num_rows :][:num_logits] if self._sizes.last_logits else None

        def step() -> None:
            self._compute(StepRows(tokens, positions, slots.long(), wanted), self._layout)

        self._layout = idle_layout(bucket.num_segments, self._capturing.padding_slot)
        rows = np.arange(bucket.num_segments, dtype=np.int32)
        self._fill(np.zeros_like(rows), rows, self._layout, bucket)
        step()
        return self._capturing.capture(step)

    def _fill(self, tokens: np.ndarray, logit_rows: np.ndarray, layout: AttentionLayout, bucket: Bucket) -> None:
        num_rows = bucket.num_rows
        numbers = np.zeros(3 * num_rows + self._num_logits(bucket), np.int32)
        rows = numbers[: 3 * num_rows].reshape(3, num_rows)
        rows[2] = self._capturing.padding_slot
        rows[:, : len(tokens)] = tokens, layout.positions, layout.slots
        numbers[3 * num_rows :][: len(logit_rows)] = logit_rows
        send(numbers, self._inputs[: numbers.size])
        self._capturing.prepare(layout, bucket)


class GraphedDecoder:
    """A decoder that replays graphs where one holds the step, and else computes it as ever."""

    likeliest: list[int] | None = None

    def __init__(
        self, decoder: Capturable, sizes: GraphSizes, capturing: Capturing, *, num_outputs: int, max_len: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._decoder = decoder
        self._graphs = StepGraphs(self._step, sizes, capturing, max_len=max_len, device=device)
        self._logits = torch.zeros((self._graphs.num_logits, num_outputs), device=device)

    def capture(self) -> None:
        """Captures all graphs."""
        self._graphs.capture()

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits, fp32 [len(batch.logit_rows), outputs]; good until the next step."""
        graph = self._graphs.find(batch)
        if graph is None:
            return self._decoder.forward(batch)
        with torch.inference_mode():
            self._graphs.replay(graph, batch)
            return self._logits[: len(batch.logit_rows)]

    def timed_forward(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """Runs forward without graphs, timed."""
        return self._decoder.timed_forward(batch)

    def _step(self, rows: StepRows, layout: AttentionLayout) -> None:
        logits = self._decoder.run(rows, layout)
        self._logits[: len(logits)].copy_(logits)


def idle_layout(num_segments: int, padding_slot: int) -> AttentionLayout:
    """One row for each of some sessions without a past, in the slot of padding: what a graph is captured with."""
    count_up = np.arange(num_segments, dtype=np.int32)
    return AttentionLayout(
        slot_table=np.full((1, 1), padding_slot, np.int32),
        first_rows=count_up,
        num_rows=np.ones(num_segments, np.int32),
        prefix_lens=np.zeros(num_segments, np.int32),
        table_rows=np.zeros(num_segments, np.int32),
        slots=np.full(num_segments, padding_slot, np.int32),
        positions=np.zeros(num_segments, np.int32),
        masks=np.zeros(0, np.bool_),
        mask_starts=np.full(num_segments, -1, np.int64),
    )


def bucket_sizes(sizes: GraphSizes, max_len: int) -> list[Bucket]:
    """Every pair of a number of sessions (1, 2, 4, 8, 16, 24, ...) and of rows (1, 2, 4, 8, ...) up to `sizes`."""
    small = [batch for batch in _SMALL_BATCHES if batch < sizes.max_batch]
    batches = [*small, *range(_BATCH_STEP, sizes.max_batch, _BATCH_STEP), sizes.max_batch]
    powers = (1 << power for power in range(sizes.max_rows.bit_length()))
    rows = [*(count for count in powers if count < sizes.max_rows), sizes.max_rows]
    pairs = [(batch, count) for batch in batches for count in rows if batch * count <= MAX_ROWS]
    return [Bucket(batch, count, max_len, has_masks=count > 1) for batch, count in pairs]


class CudaCapture:
    """Captures steps on a device; all graphs share one pool of memory, for one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # torch's own choice is of whichever device captured first

    def __call__(self, step: Step) -> Replay:
        # Twice, as the compiler may run once more when it sees the same shapes again.
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Of this thread: another of the process may be at work, as verify is when a colocated drafter begins again.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            step()
        return graph.replay


def usable_sizes(execution: Execution, device: torch.device) -> GraphSizes | None:
    """The sizes to capture; None where there are no graphs. StartupError where that is not what was asked for."""
    sizes, choice = execution.graphs, execution.attention.resolved(device)
    if sizes is None:
        return None
    if device.type != "cuda":
        reason = f"the device is {device}"
    elif choice.prefill != "triton" or choice.decode != "triton":
        reason = f"attention is {choice}, and only triton's steps can be captured"
    else:
        return sizes
    if sizes.required:
        raise StartupError(f"--cuda-graph-max-bs is given, but there can be no CUDA graphs: {reason}")
    if device.type == "cuda":
        log.warning("no CUDA graphs, decoding is slower", reason=reason)
    return None


def capturing_by_triton(attention: object, heads: Heads, pool: KVPool) -> Capturing:
    """How steps over a pool on a CUDA device are captured with Triton's attention."""
    from kernels.attention.triton import TritonAttention

    assert isinstance(attention, TritonAttention)
    return Capturing(
        prepare=lambda layout, bucket: attention.prepare(layout, heads, bucket),
        see=lambda layout, bits: attention.see(bits),
        capture=CudaCapture(pool.k.device),
        padding_slot=pool.num_slots,
    )


def with_cuda_graphs(decoder: TorchLlama, sizes: GraphSizes, pool: KVPool, dtype: torch.dtype) -> GraphedDecoder:
    """A decoder on a CUDA device with Triton's attention, its graphs captured."""
    config = decoder.config
    heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim, dtype)
    graphed = GraphedDecoder(
        decoder, sizes, capturing_by_triton(decoder.attention, heads, pool), num_outputs=decoder.num_outputs,
        max_len=len(decoder.rope), device=pool.k.device,
    )  # fmt: skip
    graphed.capture()
    return graphed
