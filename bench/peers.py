"""Outrider beside transformers, vLLM and llama.cpp: the same model, prompts and threads, interleaved in one run.

    outrider bench peers --install peers --output peers.json --plot peers.png
    outrider bench peers --llama-server PATH --vllm-python PATH --systems outrider,vllm,llama.cpp,llama.cpp-q8@1

In each round every system is started as a server, driven by `bench serve`'s code and ended; one is alive at a time. The
order turns from round to round. Ratios are taken within a round, and their median is what counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx

from bench._drive import Batch, Plan, drive, num_prompts
from bench._flags import counts, output_file, positive
from bench._install import install_llama, install_vllm
from bench._load import Load, model_of, open_client
from bench._plot import check_plot, plot
from bench._prompts import Deck, Prompt, from_file, mt_bench, random_ids
from bench._ratios import SCHEMA, Measured, Round, medians, ratio_table, ratios, speed_table
from bench._server import free_port, serving
from bench._stream import Asked, ServerRefused
from bench._systems import DEFAULT, Entry, Setup, parse_entries
from outrider.errors import StartupError


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(prog="outrider bench peers", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--systems", default=DEFAULT, help="what to compare, as NAME, or NAME@1+8 for these numbers of streams only")
    add("--concurrency", type=counts, default=[1, 8, 32], help="numbers of streams")
    add("--rounds", type=positive, default=3, help="how often each system is measured")
    add("--minutes", type=float, help="no round is begun that would not end within so many minutes")
    add("--prompts", type=Path, help="JSON Lines file of prompts; default: MT-bench's questions")
    add("--num-prompts", type=positive, help="requests under each load; default: 24 or more, by the number of streams")
    add("--max-tokens", type=positive, default=128, help="most tokens of an answer")
    add("--prefill-tokens", type=int, default=256, help="tokens of the prompts that measure prefill; 0: none")
    add("--threads", type=positive, default=2, help="threads of each server")
    add("--context-length", type=positive, default=1536, help="tokens that each stream has room for")
    add("--llama-server", type=Path, help="llama.cpp's server")
    add("--llama-ngram", default=Setup.llama_ngram, help="its flags for n-gram speculation")
    add("--vllm-python", type=Path, help="interpreter of an environment with vLLM")
    add("--vllm-eager", action="store_true", help="vLLM does not compile: slower, but quick to start")
    add("--install", type=Path, metavar="FOLDER", help="fetch vLLM and llama.cpp into a folder where no path is given")
    add("--startup-timeout-s", type=float, default=600, help="how long a server may take to come up")
    add("--logs", type=Path, help="folder for what the servers say; default: a temporary one")
    add("--output", type=output_file, help="file for all figures, as JSON, written anew after each round")
    add("--plot", type=output_file, help="file for a picture of the medians (.png, .svg or .pdf)")
    args = parser.parse_args(argv)
    check_plot(args.plot)
    return args


def setup_of(args: argparse.Namespace, entries: Sequence[Entry]) -> Setup:
    """What the systems share; fetches those that are wanted and missing, where --install allows."""
    from bench._gguf import ensure_gguf
    from engine.embedded import ensure_embedded_model

    names = [entry.system.name for entry in entries]
    if args.install:
        args.install.mkdir(parents=True, exist_ok=True)
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


def questions(args: argparse.Namespace, entries: Sequence[Entry]) -> dict[int, list[Prompt]]:
    """Prompts for each number of streams, the same for every system and round."""
    deck = Deck(from_file(args.prompts) if args.prompts else mt_bench())
    streams = sorted({number for entry in entries for number in entry.streams})
    return {number: deck.deal(args.num_prompts or num_prompts(Load(number))) for number in streams}


async def measure(url: str, entry: Entry, args: argparse.Namespace, prompts: Mapping[int, list[Prompt]]) -> Measured:
    """Questions under each load, then long random prompts, of which one token is asked."""
    async with open_client(url) as client:
        asked = Asked(await model_of(client), args.max_tokens)
        decode = await drive(client, Plan(asked, [Batch(Load(number), prompts[number]) for number in entry.streams]))
        if not args.prefill_tokens:
            return Measured([row for row, _ in decode], [])
        long = [
            Batch(Load(number), random_ids(max(number, 4), args.prefill_tokens, seed=number))
            for number in entry.streams
        ]
        prefill = await drive(client, Plan(replace(asked, max_tokens=1), long, num_warm_up=0))
    return Measured([row for row, _ in decode], [row for row, _ in prefill])


def measure_round(
    entries: Sequence[Entry], setup: Setup, args: argparse.Namespace, prompts: Mapping[int, list[Prompt]],
    failed: dict[str, str],
) -> Round:  # fmt: skip
    """Each system in turn; one that fails is named in `failed` and left out from then on."""
    measured: dict[str, Measured] = {}
    for entry in entries:
        name = entry.system.name
        if name in failed:
            continue
        began = time.monotonic()
        try:
            port = free_port()
            launch = entry.system.launch(setup, port, max(entry.streams))
            with serving(launch, port, args.logs / f"{name}.log", args.startup_timeout_s) as served:
                ready = time.monotonic()
                measured[name] = asyncio.run(measure(served.url, entry, args, prompts))
        except (StartupError, httpx.HTTPError, ServerRefused) as error:
            failed[name] = f"{type(error).__name__}: {error}"
            print(f"{name} failed: {failed[name]}", file=sys.stderr, flush=True)
        else:
            took = f"up in {ready - began:.0f} s, measured in {time.monotonic() - ready:.0f} s"
            speeds = ", ".join(
                f"{row.concurrency}: {row.decode_tokens_per_s} a stream, {row.total_tokens_per_s} in all"
                for row in measured[name].decode
            )
            print(f"  {name}: {took}; tokens/s at {speeds}", file=sys.stderr, flush=True)
    return measured


def measure_rounds(
    entries: Sequence[Entry], setup: Setup, args: argparse.Namespace
) -> tuple[list[Round], dict[str, str]]:
    """All rounds that there is time for, each from another system on; and what failed, by system."""
    prompts = questions(args, entries)
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
        rounds.append(measure_round([*entries[first:], *entries[:first]], setup, args, prompts, failed))
        longest_s = max(longest_s, time.monotonic() - round_began)
        if args.output:
            written = json.dumps(document(args, entries, rounds, failed), indent=1)
            args.output.write_text(written + "\n", encoding="utf-8")
    return rounds, failed


def document(
    args: argparse.Namespace, entries: Sequence[Entry], rounds: Sequence[Round], failed: Mapping[str, str]
) -> dict[str, Any]:
    """What --output writes; docs/benchmarking.md describes it."""
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
        args.logs.mkdir(parents=True, exist_ok=True)
        rounds, failed = measure_rounds(entries, setup, args)
    of_systems = medians(entries, rounds)
    print(speed_table(of_systems))
    compared = ratios(entries, rounds)
    if compared:
        print("", ratio_table(compared), sep="\n")
    for name, reason in failed.items():
        print(f"\n{name} failed: {reason.splitlines()[0]}")
    if args.plot:
        plot(args.plot, {name: one.decode for name, one in of_systems.items()}, f"medians of {len(rounds)} rounds")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
