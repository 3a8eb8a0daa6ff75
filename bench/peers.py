"""Outrider beside transformers, vLLM and llama.cpp: the same model, prompts and threads, interleaved in one run.

    outrider bench peers --install peers --output peers.json --plot peers.png
    outrider bench peers --systems outrider@16,outrider#2@16,outrider-eagle3@16 --prefill-tokens 0 --rounds 8
    outrider bench peers --llama-server PATH --vllm-python PATH --systems outrider,vllm,llama.cpp,llama.cpp-q8@1

In each round every system is started as a server; then each load goes to one after the other, by `bench serve`'s code,
so that what is compared was measured within a minute or two. The order turns from round to round. Ratios are taken
within a round, and their median is what counts; how much two systems of a kind differ (`outrider#2`) is the noise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from bench._drive import NUM_PROMPTS_HELP, Batch, Plan, drive, num_prompts
from bench._figures import Figures
from bench._flags import above_zero, counts, natural, output_file, output_folder, parser_of, positive
from bench._install import install_llama, install_vllm
from bench._load import Load, model_of, open_client
from bench._main import as_command
from bench._output import write_json
from bench._plot import check_plot, plot_loads
from bench._prompts import Deck, check_prompts, from_file, mt_bench, random_ids
from bench._ratios import SCHEMA, Measured, Round, medians, ratio_table, ratios, speed_table
from bench._server import free_port, serving
from bench._stream import Asked, ServerRefused
from bench._systems import DEFAULT, Entry, Setup, parse_entries
from outrider.errors import StartupError


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = parser_of("peers", __doc__)
    add = parser.add_argument
    add(
        "--systems",
        default=DEFAULT,
        help="what to compare, as NAME, or NAME@1+8 for these numbers of streams only; NAME#2: another of its kind",
    )
    add("--concurrency", type=counts, default=[1, 8, 32], help="numbers of streams")
    add("--rounds", type=positive, default=3, help="how often each system is measured")
    add("--minutes", type=above_zero, help="no round is begun that would not end within so many minutes")
    add("--prompts", type=Path, help="JSON Lines file of prompts; default: MT-bench's questions")
    add("--num-prompts", type=positive, help=NUM_PROMPTS_HELP)
    add("--max-tokens", type=positive, default=128, help="most tokens of an answer")
    add("--prefill-tokens", type=natural, default=256, help="tokens of the prompts that measure prefill; 0: none")
    add("--threads", type=positive, default=2, help="threads of each server")
    add("--context-length", type=positive, default=1536, help="tokens that each stream has room for")
    add("--llama-server", type=Path, help="llama.cpp's server")
    add("--llama-ngram", default=Setup.llama_ngram, help="its flags for n-gram speculation")
    add("--vllm-python", type=Path, help="interpreter of an environment with vLLM")
    add("--vllm-eager", action="store_true", help="vLLM does not compile: slower, but quick to start")
    add(
        "--install", type=output_folder, metavar="FOLDER",
        help="fetch vLLM and llama.cpp into a folder where no path is given",
    )  # fmt: skip
    add("--startup-timeout-s", type=above_zero, default=600, help="how long a server may take to come up")
    add("--logs", type=output_folder, help="folder for what the servers say; default: a temporary one")
    add("--output", type=output_file, help="file for all figures, as JSON, written anew after each round")
    add("--plot", type=output_file, help="file for a picture of the medians (.png, .svg or .pdf)")
    args = parser.parse_args(argv)
    check_plot(args.plot, args.output)
    check_prompts(args.prompts, args.output)
    return args


def setup_of(args: argparse.Namespace, entries: Sequence[Entry]) -> Setup:
    """The settings that systems share; fetches those that are wanted and missing, where --install allows."""
    from bench._gguf import ensure_gguf
    from engine.embedded import ensure_embedded_model

    names = [entry.system.name for entry in entries]
    if args.install:
        if args.vllm_python is None and any(name.startswith("vllm") for name in names):
            args.vllm_python = install_vllm(args.install.resolve())
        if args.llama_server is None and any(name.startswith("llama.cpp") for name in names):
            args.llama_server = install_llama(args.install.resolve())
    setup = Setup(
        model_path=ensure_embedded_model(), gguf=ensure_gguf, threads=args.threads, context_length=args.context_length,
        llama_server=args.llama_server, llama_ngram=args.llama_ngram, vllm_python=args.vllm_python,
        vllm_eager=args.vllm_eager,
    )  # fmt: skip
    for entry in entries:  # a missing path, and making a GGUF, before anything is measured
        entry.system.launch(setup, 0, 1)
    return setup


@dataclass(frozen=True)
class Stage:
    """One load that every system is put under before the next one is: questions, or long prompts for one token each."""

    figure: Literal["decode", "prefill"]
    batch: Batch

    async def measure(self, url: str, max_tokens: int) -> Figures:
        """One server under it, warm."""
        async with open_client(url) as client:
            asked = Asked(await model_of(client), max_tokens if self.figure == "decode" else 1)
            [(row, _)] = await drive(client, Plan(asked, [self.batch]))
        return row


def stages(args: argparse.Namespace, entries: Sequence[Entry]) -> list[Stage]:
    """All loads of a round: the same prompts for every system and round."""
    deck = Deck(from_file(args.prompts) if args.prompts else mt_bench())
    loads = [Load(number) for number in sorted({number for entry in entries for number in entry.streams})]
    found = [Stage("decode", Batch(load, deck.deal(num_prompts(load, args.num_prompts)))) for load in loads]
    if args.prefill_tokens:
        for load in loads:
            streams = load.concurrency or 1
            prompts = random_ids(max(streams, 4), args.prefill_tokens, seed=streams)
            found.append(Stage("prefill", Batch(load, prompts)))
    return found


class Turn:
    """One round: all servers are up, and each load goes to one after the other, so that what is compared is near in
    time. A system that fails is named in `failed`, ended, and left out from then on."""

    def __init__(self, setup: Setup, args: argparse.Namespace, failed: dict[str, str]) -> None:
        self._setup = setup
        self._args = args
        self._failed = failed
        self._up: dict[str, tuple[Entry, str, contextlib.ExitStack]] = {}

    def measure(self, entries: Sequence[Entry], loads: Sequence[Stage]) -> Round:
        """Measures one round; the figures of each system that got through."""
        measured = {entry.system.name: Measured([], []) for entry in entries}
        with contextlib.ExitStack() as all_of_them:
            for entry in entries:
                self._start(entry, all_of_them)
            for stage in loads:
                for name in list(self._up):
                    self._put_under(name, stage, measured[name])
            return {name: measured[name] for name in self._up}

    def _start(self, entry: Entry, all_of_them: contextlib.ExitStack) -> None:
        name, args = entry.system.name, self._args
        if name in self._failed:
            return
        with self._failing(name):
            own = all_of_them.enter_context(contextlib.ExitStack())
            port = free_port()
            launch = entry.system.launch(self._setup, port, max(entry.streams))
            began = time.monotonic()
            served = own.enter_context(serving(launch, port, args.logs / f"{name}.log", args.startup_timeout_s))
            self._up[name] = entry, served.url, own
            print(f"  {name}: up in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    def _put_under(self, name: str, stage: Stage, measured: Measured) -> None:
        entry, url, own = self._up[name]
        streams = stage.batch.load.concurrency
        if streams not in entry.streams:
            return
        with self._failing(name):
            row = asyncio.run(stage.measure(url, self._args.max_tokens))
            getattr(measured, stage.figure).append(row)
            speeds = f"{row.decode_tokens_per_s} a stream, {row.total_tokens_per_s} in all"
            told = speeds if stage.figure == "decode" else f"{row.total_prefill_tokens_per_s} of prompts"
            print(f"  {streams} streams, {name}: tokens/s {told}", file=sys.stderr, flush=True)
        if name in self._failed:
            del self._up[name]
            own.close()

    @contextlib.contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        try:
            yield
        except (StartupError, httpx.HTTPError, ServerRefused) as error:
            self._failed[name] = f"{type(error).__name__}: {error}"
            print(f"{name} failed: {self._failed[name]}", file=sys.stderr, flush=True)


def measure_rounds(
    entries: Sequence[Entry], setup: Setup, args: argparse.Namespace
) -> tuple[list[Round], dict[str, str]]:
    """All rounds that there is time for, each from another system on; and what failed, by system."""
    loads = stages(args, entries)
    rounds: list[Round] = []
    failed: dict[str, str] = {}
    began = time.monotonic()
    longest_s = 0.0
    for turn in range(args.rounds):
        round_began = time.monotonic()
        if args.minutes and round_began - began + longest_s > args.minutes * 60:
            print(f"{turn} of {args.rounds} rounds fit into {args.minutes:g} minutes", file=sys.stderr)
            break
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr, flush=True)
        first = turn % len(entries)
        rounds.append(Turn(setup, args, failed).measure([*entries[first:], *entries[:first]], loads))
        longest_s = max(longest_s, time.monotonic() - round_began)
        if args.output:
            write_json(args.output, document(args, entries, rounds, failed))
    return rounds, failed


def document(
    args: argparse.Namespace, entries: Sequence[Entry], rounds: Sequence[Round], failed: Mapping[str, str]
) -> dict[str, Any]:
    """The document for --output; docs/benchmarking.md describes it."""
    return {
        "schema": SCHEMA, "prompts": str(args.prompts or "mt_bench"), "max_tokens": args.max_tokens,
        "prefill_tokens": args.prefill_tokens, "threads": args.threads, "context_length": args.context_length,
        "systems": {
            entry.system.name: {"precision": entry.system.precision, "streams": entry.streams} for entry in entries
        },
        "rounds": [{name: asdict(measured) for name, measured in one.items()} for one in rounds],
        "medians": {name: asdict(measured) for name, measured in medians(entries, rounds).items()},
        "ratios": [asdict(ratio) for ratio in ratios(entries, rounds)],
        "failed": dict(failed),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Prints both tables; 1 when a system failed."""
    args = parse(argv)
    entries = parse_entries(args.systems, args.concurrency)
    setup = setup_of(args, entries)
    with tempfile.TemporaryDirectory(prefix="outrider-peers-") as logs:
        args.logs = args.logs or Path(logs)
        rounds, failed = measure_rounds(entries, setup, args)
    of_systems = medians(entries, rounds)
    print(speed_table(of_systems))
    compared = ratios(entries, rounds)
    if compared:
        print("", ratio_table(compared), sep="\n")
    for name, reason in failed.items():
        print(f"\n{name} failed: {reason.splitlines()[0]}")
    if args.plot:
        decode = {name: one.decode for name, one in of_systems.items()}
        plot_loads(args.plot, decode, f"medians of {len(rounds)} rounds")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(as_command("peers"))
