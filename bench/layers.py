"""Where a step's time goes: products, attention, norms, head, and what Python adds.

    outrider bench layers --context 512 --tokens 1,8,16 --output layers.json --plot layers.svg

Each step verifies a chain of so many tokens after the context, its KV scattered over the pool. Times are those of the
fastest of many runs: the machine's, not its neighbours'. `products` is what streaming the weights takes; beside it
stands the same by torch's oneDNN-packed linear layers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from bench._flags import above_zero, counts, output_file, parser_of, positive, thread_count
from bench._main import as_command
from bench._output import write_json
from bench._plot import check_plot, plot_parts
from engine.batch import Segment
from engine.config import ModelConfig
from engine.model_folder import resolve_model
from engine.runner import ModelRunner
from kernels.linear import Linear
from outrider.errors import StartupError

SCHEMA = "outrider.bench.layers/1"
PREFILL_CHUNK = 512
PRODUCTS = ("qkv", "output", "gate_up", "down", "head")


@dataclass
class Row:
    """One step size; milliseconds."""

    tokens: int
    total_ms: float
    median_ms: float
    parts_ms: dict[str, float]
    onednn_products_ms: float | None

    @property
    def products_ms(self) -> float:
        """All matrix products together; 0 where the kernels don't run, which time them."""
        return sum(self.parts_ms.get(name, 0.0) for name in PRODUCTS)

    @property
    def over_products(self) -> float | None:
        """The step's time by its products'."""
        return self.total_ms / self.products_ms if self.products_ms else None


def prefilled_runner(
    model: str | None, dtype: str, context: int, room: int, *, is_contiguous: bool, quantization: str | None
) -> tuple[ModelRunner, float]:
    """A runner with `context` random tokens in one session's cache, and the prefill's tokens per second."""
    size, folder = context + room, resolve_model(model)
    longest = ModelConfig.from_folder(folder).max_position
    if size > longest:
        raise StartupError(f"--context {context} and a step of {room} tokens exceed the model's {longest} positions")
    runner = ModelRunner.load(
        folder, dtype=dtype, num_slots=size, max_sessions=1, max_len=size,
        max_batch_tokens=max(PREFILL_CHUNK, room), quantization=quantization,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    runner.slot_table[0] = np.arange(size) if is_contiguous else rng.permutation(size)
    tokens = rng.integers(0, runner.config.vocab_size, context).astype(np.int32)
    start = time.perf_counter()
    for at in range(0, context, PREFILL_CHUNK):
        chunk = tokens[at : at + PREFILL_CHUNK]
        slots = runner.slot_table[0, at : at + len(chunk)].copy()
        runner.forward([Segment(0, at, chunk, slots, num_logits=0)])
    return runner, context / max(time.perf_counter() - start, 1e-9)


def measure(runner: ModelRunner, context: int, count: int, seconds: float) -> Row:
    """Runs steps of `count` tokens for about `seconds`."""
    tokens = np.random.default_rng(count).integers(0, runner.config.vocab_size, count).astype(np.int32)
    slots = runner.slot_table[0, context : context + count].copy()
    depths = np.arange(count, dtype=np.int32)
    step = Segment(0, context, tokens, slots, depths, np.tri(count, dtype=np.bool_), count)
    runs: list[tuple[float, dict[str, float]]] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(runs) < 3:
        start = time.perf_counter()
        _, parts = runner.timed_forward([step])
        runs.append((time.perf_counter() - start, parts))
    total, parts = min(runs, key=lambda run: run[0])
    parts["python"] = total - sum(parts.values())
    median = sorted(run[0] for run in runs)[len(runs) // 2]
    return Row(count, total * 1e3, median * 1e3, {name: value * 1e3 for name, value in parts.items()}, None)


def onednn_products(config: ModelConfig, dtype: torch.dtype) -> Callable[[int], Callable[[], None]]:
    """All the model's products by torch's packed layers: rows -> a function that does them once."""
    shapes = [
        (config.q_size + 2 * config.kv_size, config.hidden_size), (config.hidden_size, config.q_size),
        (2 * config.intermediate_size, config.hidden_size), (config.hidden_size, config.intermediate_size),
    ] * config.num_layers + [(config.vocab_size, config.hidden_size)]  # fmt: skip
    layers = [(Linear(torch.randn(shape).to(dtype)), shape[1]) for shape in shapes]

    def for_rows(rows: int) -> Callable[[], None]:
        inputs = {width: torch.randn(rows, width).to(dtype) for _, width in layers}

        def run() -> None:
            with torch.inference_mode():
                for layer, width in layers:
                    layer(inputs[width])

        return run

    return for_rows


def fastest_ms(run: Callable[[], None], seconds: float) -> float:
    """The fastest of the runs that fit in `seconds`."""
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def print_table(rows: list[Row]) -> None:
    """Rows as a table on stdout."""
    names = list(rows[0].parts_ms)
    columns = ["tokens", "total", "median", "products", "oneDNN", *names]
    print("".join(f"{name:>12}" for name in columns))
    for row in rows:
        onednn = f"{row.onednn_products_ms:12.2f}" if row.onednn_products_ms is not None else f"{'-':>12}"
        numbers = [row.total_ms, row.median_ms, row.products_ms]
        line = f"{row.tokens:>12}" + "".join(f"{number:12.2f}" for number in numbers) + onednn
        print(line + "".join(f"{row.parts_ms[name]:12.2f}" for name in names))


def figures_of(
    runner: ModelRunner, rows: list[Row], prefill_rate: float, options: argparse.Namespace
) -> dict[str, Any]:
    """The figures for --output."""
    return {
        "schema": SCHEMA, "backend": runner.backend, "threads": torch.get_num_threads(),
        "prefill_tokens_per_s": prefill_rate, "dtype": options.dtype, "quantization": options.quantization,
        "context": options.context,
        "steps": [
            asdict(row) | {"products_ms": row.products_ms, "over_products": row.over_products}
            for row in rows
        ],
    }  # fmt: skip


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = parser_of("layers", __doc__)
    parser.add_argument("--model-path", default=None, help="folder or hub id (default: the embedded model)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--quantization", default=None, help="int8, int8_dynamic or int4 (default: none)")
    parser.add_argument("--context", type=positive, default=512, help="tokens in the cache (default: 512)")
    parser.add_argument("--tokens", type=counts, default="1,4,8,16", help="tokens of a step (default: 1,4,8,16)")
    parser.add_argument("--threads", type=thread_count, default=None, help="CPU threads (default: all cores)")
    parser.add_argument("--seconds", type=above_zero, default=3.0, help="time for each step size (default: 3)")
    parser.add_argument("--contiguous", action="store_true", help="KV in one piece of the pool, as in a fresh server")
    parser.add_argument("--no-onednn", action="store_true", help="leave the comparison with oneDNN out")
    parser.add_argument("--output", type=output_file, help="write the figures as JSON")
    parser.add_argument("--plot", type=output_file, help="file for a picture of them (.png, .svg or .pdf)")
    args = parser.parse_args(argv)
    check_plot(args.plot, args.output)
    return args


def main(argv: list[str]) -> int:
    """Measures and prints."""
    options = parse(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    runner, prefill_rate = prefilled_runner(
        options.model_path, options.dtype, options.context, max(options.tokens), is_contiguous=options.contiguous,
        quantization=options.quantization,
    )  # fmt: skip
    rows = [measure(runner, options.context, count, options.seconds) for count in options.tokens]
    if not options.no_onednn:
        products = onednn_products(runner.config, runner.dtype)
        for row in rows:
            row.onednn_products_ms = fastest_ms(products(row.tokens), options.seconds)
    weights = options.quantization or options.dtype
    title = f"{runner.backend}, {torch.get_num_threads()} threads, {weights}, context {options.context}"
    if options.output:
        write_json(options.output, figures_of(runner, rows, prefill_rate, options), indent=2)
    print(title)
    print(f"prefill {prefill_rate:.0f} tokens/s; a step's milliseconds:")
    print_table(rows)
    if options.plot:
        names = sorted(rows[0].parts_ms, key=lambda name: name not in PRODUCTS)  # those below, the others on top
        parts = {row.tokens: {name: row.parts_ms[name] for name in names} for row in rows}
        plot_parts(options.plot, parts, {row.tokens: row.products_ms for row in rows}, title)
    return 0


if __name__ == "__main__":
    raise SystemExit(as_command("layers"))
