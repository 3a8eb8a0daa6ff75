"""The networks of an 8B target and its EAGLE-3 head on a device: step times against its memory, and what a round adds.

    outrider bench device --context 512 --nodes 8,16,32 --num-steps 5 --topk 4 --accept-length 3.69 --output device.json

Shapes are Llama-3.1-8B's and those of its published EAGLE-3 head with 32,000 draft tokens, weights random (--model-path
and --head name folders of others). Both are loaded as the services load them. A round is what they compute, without
sessions and wire: the target's step over root and nodes, drawing and the walk by the sampler's kernels, one copy to the
host, then the head over the accepted rows and the tree's growth.

    roofline_share      bytes that a plain step must read, over what reading a large array takes, over the step's time
    overhead_ms         of a round: what it took beyond its kernels, by the profiler; host and launches
    sampled             a plain step drawn at temperature 1 and top-p 0.9; the others are greedy
    speedup             accept length * plain step / round, of one session; the accept length is the flag's, since
                        weights are random
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from bench._flags import above_zero, counts, output_file, parser_of, positive
from bench._main import as_command
from bench._output import write_json
from draft_service.drafters.growing import grow, slots_needed
from draft_service.drafters.heads import features_needed, make_drafter
from draft_service.drafters.models import HeadModel
from engine.batch import Segment
from engine.devices import pick_device
from kernels.sampling import Filters
from kernels.sampling_torch import RowFilters
from kernels.transfer import Readback, to_device
from outrider.args import HEAD_ALGORITHMS, DraftArgs, VerifyArgs
from outrider.tree_limits import most_nodes
from verify_service.device_sampler import kernels_for
from verify_service.loading import load_model

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "vocab_size": 128256,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
EAGLE3_8B = LLAMA_8B | {
    "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000,
}  # fmt: skip
GREEDY, SAMPLED = Filters(temperature=0.0), Filters(temperature=1.0, top_p=0.9)
_PREFILL = 256
_PROFILED = 5
_SLEEP_CYCLES = 20_000_000  # some 10 ms of any GPU: more than launching takes


@dataclass
class Step:
    """One kind of work: milliseconds, medians; kernels_ms from the profiler, None where there is none.

    device_ms: from the first kernel's start to the last one's end where the host is never behind; what that is more
    than kernels_ms are gaps between kernels, and what wall_ms is more than it is the host.
    """

    name: str
    wall_ms: float
    device_ms: float | None
    kernels_ms: float | None
    top_kernels: list[tuple[str, float, int]] = field(default_factory=list)
    """Name, milliseconds and launches of one step, the longest first."""


class Bench:
    """Both networks, loaded, each with one session of `context` tokens (the target with --batch of them)."""

    def __init__(self, args: argparse.Namespace, target: Path, head: Path) -> None:
        most, sessions = max(args.nodes), max(args.batch)
        room = args.context + most + 1
        draft = DraftArgs(
            speculative_algorithm=args.speculative_algorithm, model_path=str(target), load_format=args.load_format,
            speculative_draft_model_path=str(head), device=args.device, max_sessions=1,
            draft_max_total_tokens=room + args.num_steps + slots_needed(args.num_steps, args.topk) + 8,
            speculative_num_steps=args.num_steps, speculative_eagle_topk=args.topk,
            speculative_num_draft_tokens=1 + min(most, most_nodes(args.num_steps, args.topk)),
        )  # fmt: skip
        verify = VerifyArgs(
            model_path=str(target), load_format=args.load_format, device=args.device, context_length=room,
            max_running_requests=sessions, max_total_tokens=sessions * room, max_verify_nodes=most,
            features=str(features_needed(draft)),
        )  # fmt: skip
        self.args, self.device = args, pick_device(args.device)
        self._kernels = kernels_for(self.device)
        self.model = cast("HeadModel", make_drafter(draft).model)
        self.runner = load_model(verify).runner
        self._sequence = self.model.cache.open()
        accepted = max(1, round(args.accept_length))
        self._features = torch.zeros(accepted, self.model.feature_width, dtype=self.runner.dtype)
        self._prefill()

    def _prefill(self) -> None:
        rng, table = np.random.default_rng(0), self.runner.slot_table
        table[:] = rng.permutation(table.size).reshape(table.shape)
        for first in range(0, self.args.context, _PREFILL):
            count = min(_PREFILL, self.args.context - first)
            words = rng.integers(0, self.model.num_read, count).astype(np.int32)
            for row in range(len(table)):
                self.runner.forward(
                    [Segment(row, first, words, table[row, first : first + count].copy(), num_logits=0)]
                )
            slots = self.model.cache.append(self._sequence, count)
            states = self.model.fuse(torch.zeros(count, self.model.feature_width))
            self.model.run([Segment(self._sequence.table_row, first, words, slots, num_logits=1)], states, 1)

    def verify(self, batch: int, nodes: int, filters: Filters = GREEDY) -> None:
        """A step of `batch` sessions with a tree of `nodes` each (0: plain decoding), drawn, walked and read back."""
        context, table, rows = self.args.context, self.runner.slot_table, nodes + 1
        tokens = np.full(rows, 7, np.int32)
        depths = np.minimum(np.arange(rows), self.args.num_steps).astype(np.int32)
        mask = np.tri(rows, dtype=np.bool_)
        segments = [
            Segment(row, context, tokens, table[row, context : context + rows].copy(), depths, mask, rows)
            if nodes
            else Segment(row, context, tokens, table[row, context : context + 1].copy())
            for row in range(batch)
        ]
        logits = self.runner.forward(segments)
        there = to_device(np.arange(batch * rows), self.device)
        of_rows, u = RowFilters.of([filters] * len(there), self.device), there.double() / len(there)
        drawn = self._kernels.draw_rows(logits, there, of_rows, u).view(batch, rows)
        parents = to_device(np.tile(np.arange(-1, nodes - 1), (batch, 1)), self.device)
        words = to_device(np.full((batch, nodes), 7), self.device)
        found = self._kernels.accept_coupled(parents, words, to_device(np.full(batch, nodes), self.device), drawn)
        back = Readback()
        back.add_all(found)
        back.fetch()

    def draft(self, nodes: int) -> None:
        """What follows a verdict: the head over the accepted rows, and a tree of `nodes`."""
        accepted, sequence, cache = len(self._features), self._sequence, self.model.cache
        words = np.full(accepted, 7, np.int32)
        first, slots = sequence.num_rows, cache.append(sequence, accepted)
        segment = Segment(sequence.table_row, first, words, slots, num_logits=1)
        tips = self.model.run([segment], self.model.fuse(self._features), self.args.topk)
        grow(self.model, [sequence], tips, num_steps=self.args.num_steps, topk=self.args.topk, num_nodes=[nodes])
        cache.truncate(sequence, first)

    def read_bytes(self) -> int:
        """Bytes that a plain step of one session reads: weights but the embedding, and its keys and values."""
        config = self.runner.config
        layer = config.hidden_size * (2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size)
        weights = config.num_layers * layer + config.vocab_size * config.hidden_size
        keys = 2 * config.num_layers * config.kv_size * self.args.context
        return self.runner.dtype.itemsize * (weights + keys)

    def timed(self, name: str, work: Callable[[], None]) -> Step:
        """Wall time of a repeat, median; then some under the profiler."""
        for _ in range(3):
            work()
        self._wait()
        times, end = [], time.perf_counter() + self.args.seconds
        while time.perf_counter() < end or len(times) < 5:
            start = time.perf_counter()
            work()
            times.append((time.perf_counter() - start) * 1e3)
        wall_ms = statistics.median(times)
        if self.device.type != "cuda":
            return Step(name, wall_ms, None, None)
        kernels = self._profiled(work)
        return Step(name, wall_ms, self._device_ms(work), sum(ms for _, ms, _ in kernels), kernels[:16])

    def _device_ms(self, work: Callable[[], None]) -> float:
        """While the device sleeps the host launches all that it does not wait for."""
        found: list[float] = []
        for _ in range(_PROFILED):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_SLEEP_CYCLES)
            start.record()
            work()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end))
        return statistics.median(found)

    def _profiled(self, work: Callable[[], None]) -> list[tuple[str, float, int]]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(_PROFILED):
                work()
            self._wait()
        found = [
            (event.key[:96], event.self_device_time_total / 1e3 / _PROFILED, event.count // _PROFILED)
            for event in profile.key_averages()
            if event.self_device_time_total > 0
        ]
        return sorted(found, key=lambda one: -one[1])

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(args: argparse.Namespace, target: Path, head: Path) -> dict[str, Any]:
    """Measures all figures."""
    bench = Bench(args, target, head)
    rate = read_rate(bench.device)
    batches = sorted({1, *args.batch})  # a round is of one session, and so is the plain step that it is held to
    alone = {
        kind: {
            str(batch): bench.timed(f"{kind}, {batch} sessions", lambda b=batch, f=filters: bench.verify(b, 0, f))
            for batch in batches
        }
        for kind, filters in (("plain", GREEDY), ("sampled", SAMPLED))
    }
    rounds: list[dict[str, Any]] = []
    one = alone["plain"]["1"]
    for nodes in args.nodes:
        count = min(nodes, most_nodes(args.num_steps, args.topk))
        verify = bench.timed(f"verify, {nodes} nodes", lambda n=nodes: bench.verify(1, n))
        draft = bench.timed(f"draft, {count} nodes", lambda n=count: bench.draft(n))
        wall = verify.wall_ms + draft.wall_ms
        row: dict[str, Any] = {"nodes": nodes, "verify": asdict(verify), "draft": asdict(draft), "round_ms": wall}
        if verify.kernels_ms is not None and draft.kernels_ms is not None:
            row["overhead_ms"] = wall - verify.kernels_ms - draft.kernels_ms
        row["speedup"] = args.accept_length * one.wall_ms / wall
        rounds.append(row)
    floor_ms = bench.read_bytes() / rate * 1e3
    return {
        "device": torch.cuda.get_device_name() if bench.device.type == "cuda" else "cpu",
        "torch": torch.__version__, "backend": bench.runner.backend, "context": args.context,
        "read_gb_per_s": rate / 1e9, "read_gb": bench.read_bytes() / 1e9, "floor_ms": floor_ms,
        "roofline_share": floor_ms / one.wall_ms,
        "kernels_roofline_share": None if one.kernels_ms is None else floor_ms / one.kernels_ms,
        **{kind: {batch: asdict(step) for batch, step in steps.items()} for kind, steps in alone.items()},
        "rounds": rounds,
    }  # fmt: skip


def _report(figures: dict[str, Any]) -> str:
    plain = figures["plain"]["1"]
    lines = [
        f"{figures['device']}, torch {figures['torch']}, {figures['backend']}, context {figures['context']}",
        f"a plain step reads {figures['read_gb']:.2f} GB, at {figures['read_gb_per_s']:.0f} GB/s "
        f"{figures['floor_ms']:.2f} ms; it takes {plain['wall_ms']:.2f} ms: "
        f"{figures['roofline_share']:.1%} of the roofline",
    ]
    alone = (step for kind in ("plain", "sampled") for step in figures[kind].values())
    steps = [*alone, *(row[kind] for row in figures["rounds"] for kind in ("verify", "draft"))]
    for step in steps:
        device, kernels = ("-" if step[key] is None else f"{step[key]:.2f}" for key in ("device_ms", "kernels_ms"))
        lines.append(f"{step['name']:<24} {step['wall_ms']:8.2f} ms, device {device} ms, kernels {kernels} ms")
    for row in figures["rounds"]:
        beyond = f", {row['overhead_ms']:.2f} ms beyond its kernels" if "overhead_ms" in row else ""
        lines.append(f"round of {row['nodes']} nodes: {row['round_ms']:.2f} ms{beyond}, speedup {row['speedup']:.2f}")
    return "\n".join(lines)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("device", __doc__)
    add = parser.add_argument
    add("--model-path", type=Path, help="folder of the target; default: Llama-3.1-8B's shapes")
    add("--head", type=Path, help="folder of an EAGLE or EAGLE-3 head for it; default: EAGLE-3's shapes for that")
    add("--speculative-algorithm", choices=HEAD_ALGORITHMS, default="EAGLE3", help="what the head is served as")
    add("--load-format", choices=("dummy", "auto"), default="dummy", help="random weights, or those in the folders")
    add("--device", default="auto", help="cpu, cuda or cuda:N")
    add("--context", type=positive, default=512, help="tokens in the caches")
    add("--batch", type=counts, default=[1, 8, 32], help="sessions of a plain step; one is timed always")
    add("--nodes", type=counts, default=[8, 16, 32], help="of a tree")
    add("--num-steps", type=positive, default=5, help="depth of a tree")
    add("--topk", type=positive, default=4, help="branches of a node")
    add("--accept-length", type=above_zero, default=3.69, help="tokens of a round, on average")
    add("--seconds", type=above_zero, default=1.0, help="time for each kind of step")
    add("--output", type=output_file, help="file for the figures as JSON")
    args = parser.parse_args(list(argv))
    if (args.model_path is None) != (args.head is None):
        parser.error("give --model-path and --head together, or neither")
    return args


def main(argv: Sequence[str]) -> int:
    """Measures, prints, and writes JSON where asked to."""
    args = _parse(argv)
    with tempfile.TemporaryDirectory() as name:
        folders: list[Path] = []
        for path, shapes, kind in ((args.model_path, LLAMA_8B, "target"), (args.head, EAGLE3_8B, "head")):
            folder = path or Path(name) / kind
            if path is None:
                folder.mkdir()
                (folder / "config.json").write_text(json.dumps(shapes), encoding="utf-8")
            folders.append(folder)
        figures = measure(args, *folders)
    if args.output:
        write_json(args.output, figures)
    print(_report(figures))
    return 0


def read_rate(device: torch.device) -> float:
    """Bytes a second that adding up a large array reads, the best of ten."""
    count = 2**29 if device.type == "cuda" else 2**25
    numbers, best = torch.ones(count, device=device), float("inf")
    for _ in range(10):
        start = time.perf_counter()
        numbers.sum().item()
        best = min(best, time.perf_counter() - start)
    return 4 * count / best


if __name__ == "__main__":
    raise SystemExit(as_command("device"))
