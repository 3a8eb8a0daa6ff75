"""Goodput of fixed trees against the planner, by the number of streams, in the same two services.

    outrider bench goodput --batch 1,4,8,16,32 --fixed 1,1,2/3,1,4/5,4,8 --turns 3 --output goodput.json -- \\
        --speculative-algorithm EAGLE3 --speculative-draft-model-path HEAD

    outrider bench goodput --batch 8,16 --fixed none --quantization int8_dynamic -- --speculative-algorithm EAGLE3

    outrider bench goodput --batch 8 --fixed none --beside 3,1,4 -- --speculative-algorithm EAGLE3

    outrider bench goodput --stand-in --batch 1,4,8,16,32 --output goodput.json

What follows `--` are flags of `outrider draft` (default: NGRAM). With --stand-in both networks are those of `bench
wire`, of fixed times and scripted acceptance, and the drafter's trees are chains. Each turn runs the same prompts
without speculation, with the planner and the brake choosing, and with each tree fixed by the request, which both then
leave as it is; ratios are taken within a turn. With --beside, one stream more has a tree of its own all the while: what
a user's fixed tree costs others.

    batches.N.WAY.tokens_per_s          all streams together; N: their number
    batches.N.WAY.over_plain.median     over those without speculation
    batches.N.planned.over_best_fixed   median over the fixed tree for which that is least
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import uvloop

from bench._flags import above_zero, counts, output_file, parser_of, positive, refuse_given, setting, shapes
from bench._main import as_command
from bench._output import write_json
from bench._pairs import PLAIN, PLANNED, TurnLoad, Way, compare, fixed, prompts, table
from bench._plot import check_plot, plot_goodput
from bench._wire_script import PROMPT_LEN, Setting
from outrider import env
from outrider.args import DraftArgs
from outrider.errors import StartupError
from outrider.wire import pack_ids

DEFAULT_TREES = "1,1,2/3,1,4/5,4,8"
STAND_IN_TREES = "1,1,2/2,1,3/3,1,4/5,1,6/7,1,8"
_MOST_STEPS = 7
_STAND_IN = {"verify_ms": 7.5, "draft_ms": 4.9, "accept_length": 3.69}  # flags of the one alone, with their defaults
_REAL = {"threads": 2, "model_path": None, "quantization": None}


def main(words: list[str] | None = None) -> int:
    """Prints the table; writes JSON where asked."""
    words = list(sys.argv[1:] if words is None else words)
    cut = words.index("--") if "--" in words else len(words)
    flags = words[cut + 1 :]
    args = _parse(words[:cut], flags)
    if not (flags or args.stand_in):
        flags = ["--speculative-algorithm=NGRAM", "--speculative-ngram-scope=session"]
    result = {"setting": setting(args), "draft": flags}
    measured = _measure_stand_in(args) if args.stand_in else _measure(args, flags)
    result |= uvloop.run(measured)
    if args.output is not None:
        write_json(args.output, result)
    print(table(result, PLAIN.name))
    if args.plot is not None:
        title = "stand-in networks" if args.stand_in else " ".join(flags)
        plot_goodput(args.plot, result["batches"], PLAIN.name, title)
    return 0


def trees(text: str) -> list[Way]:
    """Steps, branches and draft tokens, joined by slashes; `none`: no tree."""
    return [] if text == "none" else [fixed(*shape) for shape in shapes(text)]


def one_tree(text: str) -> Way:
    """Steps, branches and draft tokens of a single tree."""
    ways = trees(text)
    if len(ways) != 1:
        raise argparse.ArgumentTypeError(f"{text} is not a tree, STEPS,BRANCHES,TOKENS")
    return ways[0]


def _parse(words: list[str], draft_flags: list[str]) -> argparse.Namespace:
    parser = parser_of("goodput", __doc__, epilog="Flags of `outrider draft` follow after --.")
    parser.add_argument("--batch", type=counts, default=[1, 4, 8, 16, 32], help="numbers of streams")
    parser.add_argument("--stand-in", action="store_true", help="scripted networks instead of real ones")
    parser.add_argument("--verify-ms", type=above_zero, help="a step of the stand-in target, rows apart; default: 7.5")
    parser.add_argument("--draft-ms", type=above_zero, help=f"the stand-in drafter's {_MOST_STEPS} steps; default: 4.9")
    parser.add_argument("--accept-length", type=float, help="of the stand-in's longest chains; default: 3.69")
    parser.add_argument("--fixed", type=trees, help="trees, STEPS,BRANCHES,TOKENS/..., or none")
    parser.add_argument("--beside", type=one_tree, help="tree of one stream more, STEPS,BRANCHES,TOKENS; default: none")
    parser.add_argument("--turns", type=positive, default=3, help="how often all ways are run")
    parser.add_argument("--max-tokens", type=positive, default=96, help="tokens of an answer")
    parser.add_argument("--threads", type=positive, help="of verify's forward pass, and of the drafter's; default: 2")
    parser.add_argument("--model-path", type=Path, help="the target; default: the embedded model")
    parser.add_argument("--quantization", help="of the target, and of a draft model with it")
    parser.add_argument("--output", type=output_file, help="JSON file")
    parser.add_argument("--plot", type=output_file, help="file for a picture of the ratios (.png, .svg or .pdf)")
    args = parser.parse_args(words)
    check_plot(args.plot, args.output)
    defaults = _STAND_IN if args.stand_in else _REAL
    if args.stand_in:
        refuse_given(parser, args, list(_REAL), "is for real networks; --stand-in has none")
        if draft_flags:
            parser.error(f"{draft_flags[0]} is for `outrider draft`, which --stand-in does not run")
    else:
        refuse_given(parser, args, list(_STAND_IN), "is for --stand-in")
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.stand_in and not 1.0 <= args.accept_length <= _MOST_STEPS + 1:
        parser.error(f"--accept-length is {args.accept_length}; {_MOST_STEPS} steps give 1 to {_MOST_STEPS + 1}")
    if args.fixed is None:
        args.fixed = trees(STAND_IN_TREES if args.stand_in else DEFAULT_TREES)
    return args


async def _measure_stand_in(args: argparse.Namespace) -> dict[str, Any]:
    setting = Setting(
        verify_ms=args.verify_ms, draft_ms=args.draft_ms, accept_length=args.accept_length, hit_rate=0.9,
        batch=_most_streams(args), topk=1, num_steps=_MOST_STEPS, num_draft_tokens=33, feature_width=0,
        num_tokens=args.max_tokens, burn=False, early=False, seed=0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="org-") as folder:
        address = f"unix:{folder}/verify"
        verify, draft = (("bench._goodput_stand_in", part, address, setting.to_json()) for part in ("verify", "draft"))
        keys = [pack_ids([1 + key] * PROMPT_LEN) for key in range(_most_streams(args))]
        load = TurnLoad(args.batch, args.max_tokens, args.turns, args.beside)
        return await compare(verify, draft, address, keys, [PLAIN, PLANNED, *args.fixed], load)


async def _measure(args: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    from engine.embedded import ensure_embedded_model

    model = args.model_path or ensure_embedded_model()
    with tempfile.TemporaryDirectory(prefix="org-") as folder:
        address = f"unix:{folder}/verify"
        computing = (
            f"--threads={args.threads}",
            *([f"--quantization={args.quantization}"] if args.quantization else []),
        )
        draft = (
            "outrider", "draft", f"--verify-address={address}", f"--model-path={model}",
            *(computing if drafts_by_model(flags) else ()), *flags,
        )  # fmt: skip
        verify = (
            "outrider", "verify", f"--listen={address}", f"--model-path={model}", *computing,
            f"--max-running-requests={_most_streams(args)}", f"--features={_features(draft)}",
        )  # fmt: skip
        draft = (*draft, f"--listen=unix:{folder}/draft")
        load = TurnLoad(args.batch, args.max_tokens, args.turns, args.beside)
        return await compare(verify, draft, address, prompts(model), [PLAIN, PLANNED, *args.fixed], load)


def _most_streams(args: argparse.Namespace) -> int:
    return max(args.batch) + (args.beside is not None)


def drafts_by_model(flags: list[str]) -> bool:
    """Whether flags of `outrider draft` name drafts that a model makes."""
    return (DraftArgs.parse(flags).speculative_algorithm or "NGRAM").upper() != "NGRAM"


def _features(draft: tuple[str, ...]) -> str:
    """The features that verify must keep for these drafts, as the drafter says."""
    told = subprocess.run(
        [sys.executable, "-P", "-m", *draft, "--describe"], capture_output=True, text=True, env=env.for_child(),
        check=False,
    )  # fmt: skip
    if told.returncode != 0:
        raise StartupError(told.stderr.strip())
    return json.loads(told.stdout.splitlines()[-1])["features"]


if __name__ == "__main__":
    raise SystemExit(as_command("goodput"))
