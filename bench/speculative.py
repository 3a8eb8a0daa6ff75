"""Which steps, topk and draft tokens are fastest here, by batch size: SGLang's bench_speculative.py for Outrider.

    outrider bench speculative --speculative-algorithm EAGLE3 --batch-size 1 4 --output output.jsonl --plot grid.svg

Its grid, its two skipping rules and its fields. Unlike it, one server runs for the whole grid and each request asks for
its setting, so that settings are compared within one process; flags that are not named here go to `outrider serve`.
A line of the output has batch_size, steps, topk, num_draft_tokens, acc_length, step_time (seconds, the 20th
percentile of the time between a stream's events), speed (acc_length / step_time: tokens/s of a stream) and
completion_tokens, the mean. At the end: the best setting of each batch size, as flags to paste.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench._figures import accept_length_of, percentile
from bench._flags import SERVE_EPILOG, natural, output_file, own_and_other, parser_of, positive, refuse_given
from bench._grid import BATCH_SIZES, DRAFT_TOKENS, STEPS, TOPKS, Setting, best, grid
from bench._load import Load, Run, failures_told, model_of, open_client, run
from bench._main import as_command
from bench._output import writing
from bench._plot import check_plot, plot_grid
from bench._prompts import Deck, Prompt, check_prompts, from_file, mt_bench
from bench._serve_flags import check_serve_flags, without_drafts
from bench._server import ours_serving
from bench._stream import Asked
from outrider.errors import StartupError


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The command line, and the words that are the server's."""
    parser = parser_of("speculative", __doc__, epilog=SERVE_EPILOG)
    add = parser.add_argument
    add("--speculative-algorithm", default="NGRAM", help="how drafts are made")
    add("--batch-size", type=positive, nargs="+", default=BATCH_SIZES, help="streams at once")
    add("--steps", type=natural, nargs="+", help="depths of a tree; 0, with both others: plain decoding")
    add("--topk", type=natural, nargs="+", help="branches of a node")
    add("--num-draft-tokens", type=natural, nargs="+", default=DRAFT_TOKENS, help="nodes of a tree, root included")
    add("--start", type=natural, default=0, help="the first setting of the grid to measure")
    add("--end", type=natural, help="the one not measured any more")
    add("--num-prompts", type=positive, default=16, help="requests of a setting, at least the batch size")
    add("--prompts", type=Path, help="JSON Lines file of prompts; default: MT-bench's questions")
    add("--max-tokens", type=positive, default=512, help="tokens of an answer, at least 16")
    add("--output", type=output_file, default="output.jsonl", help="JSON Lines, a line added for each setting")
    add("--plot", type=output_file, help="file for a picture of them (.png, .svg or .pdf)")
    args, rest = own_and_other(parser, argv)
    check_plot(args.plot, args.output)
    check_prompts(args.prompts, args.output)
    if args.speculative_algorithm.upper() == "NONE":
        parser.error("--speculative-algorithm NONE has no settings to compare")
    if args.speculative_algorithm.upper() == "NGRAM":
        refuse_given(parser, args, ["steps", "topk"], "is for trees; NGRAM has --num-draft-tokens alone")
    args.steps, args.topk = args.steps or STEPS, args.topk or TOPKS
    if args.max_tokens < 16:
        parser.error(f"--max-tokens is {args.max_tokens}; an answer of less than 16 has too few steps to time")
    return args, rest


def server_flags(args: argparse.Namespace, settings: Sequence[Setting], rest: Sequence[str]) -> list[str]:
    """`outrider serve`'s words: room for the largest setting. StartupError for words that it refuses."""
    words = [f"--speculative-algorithm={args.speculative_algorithm}"]
    words += [f"--max-running-requests={max(setting.batch_size for setting in settings)}"]
    speculating = [setting for setting in settings if setting.speculates]
    words += _scope(args.speculative_algorithm)
    if speculating and args.speculative_algorithm.upper() != "NGRAM":
        steps, topk = max(setting.steps for setting in speculating), max(setting.topk for setting in speculating)
        words += [f"--speculative-num-steps={steps}", f"--speculative-eagle-topk={topk}"]
    if speculating:
        words.append(f"--speculative-num-draft-tokens={max(setting.num_draft_tokens for setting in speculating)}")
    words += rest
    check_serve_flags(words)
    return words


def _scope(algorithm: str) -> list[str]:
    """Each question is asked once with each setting: its answer must not be drafted from itself."""
    return ["--speculative-ngram-scope=session"] if algorithm.upper() == "NGRAM" else []


def to_paste(setting: Setting, algorithm: str, rest: Sequence[str]) -> str:
    """Words for `outrider serve`: the server's own, and after them the setting, whose flags count then."""
    own = [*_scope(algorithm), *rest] if setting.speculates else without_drafts(rest)
    return shlex.join([*own, *shlex.split(setting.flags(algorithm))])


def line(setting: Setting, done: Run) -> dict[str, Any]:
    """One setting's figures, named and rounded as SGLang's. StartupError when no stream had two steps."""
    gaps = sorted(gap for answer in done.answers for gap in answer.gaps_s)
    if not gaps:
        raise StartupError("no answer took more than one step: raise --max-tokens")
    told = accept_length_of(done.answers) if setting.speculates else None
    accept = 1.0 if told is None else told
    step_s = percentile(gaps, 20)
    return {
        **asdict(setting), "acc_length": round(accept, 3), "step_time": float(f"{step_s:.4g}"),
        "speed": round(accept / step_s, 3),
        "completion_tokens": round(statistics.fmean(answer.completion_tokens for answer in done.answers), 3),
    }  # fmt: skip


async def measure(
    url: str, settings: Sequence[Setting], prompts: Sequence[Prompt], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Every setting: one batch to warm up, then its requests; a line is written as soon as it is known."""
    rows: list[dict[str, Any]] = []
    async with open_client(url) as client:
        model = await model_of(client)
        for number, setting in enumerate(settings, 1):
            count = max(args.num_prompts, setting.batch_size)
            asked = Asked(model, args.max_tokens, ignore_eos=True, extra={"speculative": setting.asked()})
            load = Load(setting.batch_size)
            dealt = Deck(prompts).deal(count)  # the same for all settings
            await run(client, dealt[: setting.batch_size], asked, load)
            rows.append(line(setting, await run(client, dealt, asked, load)))
            with writing(args.output), args.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(f"{number}/{len(settings)} {json.dumps(rows[-1])}", file=sys.stderr, flush=True)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measures, and prints the best."""
    args, rest = parse(argv)
    ngram = args.speculative_algorithm.upper() == "NGRAM"
    found = grid(args.batch_size, args.steps, args.topk, args.num_draft_tokens, ngram=ngram)
    settings = found[args.start : args.end]
    if found and not settings:
        raise StartupError(f"--start {args.start} and --end {args.end} leave none of {len(found)} settings")
    if not settings:
        raise StartupError("the grid holds no setting: SGLang's rules leave out trees that cannot hold their tokens")
    prompts = from_file(args.prompts) if args.prompts else mt_bench()
    with ours_serving(server_flags(args, settings, rest)) as served, failures_told(served.url):
        rows = asyncio.run(measure(served.url, settings, prompts, args))
    if args.plot:
        plot_grid(args.plot, rows, f"{args.speculative_algorithm}, {args.max_tokens} tokens an answer")
    print("| streams | steps | topk | draft tokens | accept length | tokens/s a stream | flags |\n" + "|---" * 7 + "|")
    for batch, row in best(rows).items():
        setting = Setting(batch, row["steps"], row["topk"], row["num_draft_tokens"])
        cells = [batch, *(row[key] for key in ("steps", "topk", "num_draft_tokens", "acc_length", "speed"))]
        print("| " + " | ".join(map(str, [*cells, f"`{to_paste(setting, args.speculative_algorithm, rest)}`"])) + " |")
    return 0


if __name__ == "__main__":
    raise SystemExit(as_command("speculative"))
