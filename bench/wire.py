"""The wire and the overlap: both services over gRPC with scripted networks of fixed latency, against the theory.

    outrider bench wire --verify-ms 7.5 --draft-ms 3.5 --accept-length 3.69 --hit-rate 0.9 --batch 1 --topk 1 --output F

Only the forward passes are stood in for: the target's takes --verify-ms a step, the drafter's --draft-ms a round (a
share of it for each of its --num-steps steps), both by sleeping, or with --burn by as much CPU time. They play a text
cut into rounds of --accept-length tokens on average, and a guess at a bonus token is right with probability --hit-rate.
Scheduler, pool, matching, acceptance, frames, features and the drafter's worker are the services' own, in two processes
on the cores that `outrider serve` would give them, with the tree fixed by the request. Networks that sleep stand for
those of a device, so the services poll (--busy-poll) as they do beside one. --feature-width 0 drafts as a small
language model would, without rows.

Run twice, each time with processes of its own: one after the other, and with OUTRIDER_ENABLE_SPEC_V2. In the output:

    sequential.share_of_theory   tokens/s over accept length / (V + D + R)
    overlap.share_of_theory      tokens/s over accept length / (V + (1 - h)(D + R))
    grpc_ms, grpc_over_echo      a round's time in gRPC (both directions, sequential run), and over that of echo_ms
    echo_ms                      a bare grpc.aio echo of the same bytes, paced like rounds, between and after the runs

    hit_rate, in_time_rate       rounds that verified an early proposal; steps for which verify had a tree at once
    wrong_next_share             verdicts that did not verify what `next` had foretold

V, D and h are the flags'; R is the median of echo_ms, unless --round-trip-ms says; the accept length is the script's,
so rounds cut short count against the services. The first 15 % of a run count neither for rates nor for grpc_ms. Of
several sessions a step that misses one draft waits for it: there h is the chance that none misses. `share_as_timed`
takes V and D as they were in this run. `hops_ms` tells where the time between two steps goes, median of the rounds that
waited for a fresh draft. --picture draws some rounds of both runs, where there is one session.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from bench._flags import above_zero, natural, not_below_zero, output_file, parser_of, positive, tokens_of_trees
from bench._main import as_command
from bench._output import write_json
from bench._plot import check_plot
from bench._process import process
from bench._wire_echo import round_trips_ms
from bench._wire_hops import rounds
from bench._wire_picture import draw
from bench._wire_run import WARM_SHARE, Played, load_average, play, rate
from bench._wire_script import NUM_TOP, Setting
from outrider.busy_poll import is_wanted
from outrider.placement import cores_of_two

LLAMA_8B_EAGLE3_WIDTH = 3 * 4096
_ECHOES = 400
_FOLDER_PREFIX = "orw-"  # short: a Unix socket's path has at most 107 bytes


def main(words: list[str] | None = None) -> int:
    """Runs both ways; prints the figures, and writes them to --output; draws some rounds where asked."""
    args = _parse(words)
    figures, sequential, overlap = uvloop.run(_measure(args))
    if args.output is not None:
        write_json(args.output, figures, indent=2)
    print(json.dumps(figures, indent=2))
    if args.picture is not None:
        draw({"one after the other": sequential, "with overlap": overlap}, args.picture)
    return 0


def _parse(words: list[str] | None) -> argparse.Namespace:
    parser = parser_of("wire", __doc__)
    parser.add_argument("--verify-ms", type=above_zero, default=7.5, help="the target's step")
    parser.add_argument("--draft-ms", type=above_zero, default=3.5, help="the drafter's round")
    parser.add_argument("--accept-length", type=float, default=3.69, help="tokens committed a round, on average")
    parser.add_argument("--hit-rate", type=float, default=0.9, help="chance that a bonus is guessed right")
    parser.add_argument("--round-trip-ms", type=not_below_zero, help="R of the theory; default: as echoed")
    parser.add_argument("--batch", type=positive, default=1, help="sessions at once")
    parser.add_argument("--topk", type=int, choices=range(1, NUM_TOP), default=1, metavar="1..15", help="branches")
    parser.add_argument("--num-steps", type=positive, default=5, help="depth of a tree")
    parser.add_argument("--num-draft-tokens", type=positive, help="nodes and root; default: 16 at most, of a chain all")
    parser.add_argument("--feature-width", type=int, default=LLAMA_8B_EAGLE3_WIDTH, help="of a row; 0: none")
    parser.add_argument("--seconds", type=above_zero, default=5.0, help="length of each run, by the theory")
    parser.add_argument("--burn", action="store_true", help="burn CPU instead of sleeping")
    parser.add_argument("--busy-poll", choices=("auto", "on", "off"), default="auto", help="as of the services")
    parser.add_argument("--core-placement", choices=("auto", "off"), default="auto", help="as of `outrider serve`")
    parser.add_argument("--seed", type=natural, default=0)
    parser.add_argument("--output", type=output_file, help="JSON file")
    parser.add_argument("--picture", type=output_file, help="file for a picture of some rounds, with --batch 1")
    args = parser.parse_args(words)
    check_plot(args.picture, args.output, "--picture")
    if args.picture is not None and args.batch > 1:
        parser.error(f"--picture draws one session; --batch is {args.batch}")
    least_tokens, most_tokens = tokens_of_trees(args.num_steps, args.topk)
    args.num_draft_tokens = args.num_draft_tokens or max(least_tokens, min(16, most_tokens))
    if not least_tokens <= args.num_draft_tokens <= most_tokens:
        parser.error(
            f"--num-draft-tokens is {args.num_draft_tokens}; --num-steps {args.num_steps} and --topk {args.topk} give "
            + (f"{most_tokens}" if least_tokens == most_tokens else f"{least_tokens} to {most_tokens}")
        )
    most = min(args.num_steps + 1, args.num_draft_tokens)
    if not 1.0 <= args.accept_length <= most:
        parser.error(
            f"--accept-length is {args.accept_length}; {args.num_steps} steps and {args.num_draft_tokens} draft tokens "
            f"give 1 to {most}"
        )
    if not 0.0 <= args.hit_rate <= 1.0:
        parser.error(f"--hit-rate is {args.hit_rate}; it must be from 0 to 1")
    if args.feature_width % 3 or args.feature_width < 0:
        parser.error(f"--feature-width is {args.feature_width}; it is that of three layers' states")
    return args


def _setting(args: argparse.Namespace, *, early: bool) -> Setting:
    cycle_ms = args.verify_ms + (0.0 if early else args.draft_ms)
    return Setting(
        verify_ms=args.verify_ms, draft_ms=args.draft_ms, accept_length=args.accept_length, hit_rate=args.hit_rate,
        batch=args.batch, topk=args.topk, num_steps=args.num_steps, num_draft_tokens=args.num_draft_tokens,
        feature_width=args.feature_width, num_tokens=max(32, int(1000 * args.seconds / cycle_ms * args.accept_length)),
        burn=args.burn, early=early, seed=args.seed, cores=_cores(args),
        busy_poll=is_wanted(args.busy_poll, on_device=not args.burn),
    )  # fmt: skip


def _cores(args: argparse.Namespace) -> tuple[int, int] | None:
    return cores_of_two() if args.core_placement == "auto" else None


async def _measure(args: argparse.Namespace) -> tuple[dict[str, Any], Played, Played]:
    """The figures, and what was played one after the other and with overlap."""
    with tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX) as name:
        folder = Path(name)
        address = f"unix:{folder}/echo"
        verify_core, draft_core = _cores(args) or (None, None)
        async with process("bench._wire_echo", address, *([] if verify_core is None else [str(verify_core)])):
            sequential = await play(_setting(args, early=False), folder)
            down, up = (_mean(sequential.draft[kind]) for kind in ("round_bytes", "proposal_bytes"))
            pace = {"up": round(up), "down": round(down), "pause_ms": args.verify_ms + args.draft_ms}
            count = min(_ECHOES, max(20, len(sequential.draft["trips"])))
            echo_ms = await round_trips_ms(address, count=count, core=draft_core, **pace)
            overlap = await play(_setting(args, early=True), folder)
            echo_ms += await round_trips_ms(address, count=count, core=draft_core, **pace)
    echo, grpc_ms = _percentiles(echo_ms), _percentiles(_grpc_ms(sequential))
    round_trip_ms = echo["p50"] if args.round_trip_ms is None else args.round_trip_ms
    d_r = args.draft_ms + round_trip_ms
    missed = 1.0 - args.hit_rate**args.batch
    figures = {
        "setting": {k: v for k, v in vars(args).items() if not isinstance(v, Path)},
        "round_trip_ms": round_trip_ms,
        "load_average": load_average(),
        "sequential": _figures(sequential, args.verify_ms + d_r, 1.0, round_trip_ms),
        "overlap": _figures(overlap, args.verify_ms + missed * d_r, missed, round_trip_ms),
        "grpc_ms": grpc_ms,
        "echo_ms": echo,
        "grpc_over_echo": {name: grpc_ms[name] / echo[name] for name in echo},
    }
    return figures, sequential, overlap


def _figures(played: Played, cycle_ms: float, missed: float, round_trip_ms: float) -> dict[str, Any]:
    """cycle_ms: of a round by the theory; missed: share of the rounds that wait for a draft."""
    measured, setting, verify, foretold = rate(played), played.setting, played.verify, played.draft["foretold"]
    theory = 1000 * setting.batch * measured.tokens_per_round / cycle_ms
    timed_ms = _mean(verify["steps_ms"]) + missed * (
        setting.num_steps * _mean(played.draft["steps_ms"]) + round_trip_ms
    )
    steps = sum(foretold.get(kind, 0) for kind in ("proposal", "waiting", "plain"))
    return {
        "share_of_theory": measured.tokens_per_s / theory,
        "share_as_timed": measured.tokens_per_s / (1000 * setting.batch * measured.tokens_per_round / timed_ms),
        "tokens_per_s": measured.tokens_per_s,
        "theory_tokens_per_s": theory,
        "round_ms": 1000 * setting.batch * measured.tokens_per_round / measured.tokens_per_s,
        "theory_round_ms": cycle_ms,
        "accept_length": verify["committed_tokens"] / max(1, verify["verify_steps"]),
        "script_accept_length": measured.tokens_per_round,
        "num_tokens": sum(stream.num_tokens[-1] for stream in played.streams),
        "verify_steps": verify["verify_steps"],
        "hit_rate": foretold.get("early", 0) / max(1, foretold.get("rounds", 0)),
        "in_time_rate": foretold.get("proposal", 0) / max(1, steps),
        "next": foretold,
        "wrong_next_share": foretold.get("wrong", 0) / max(1, foretold.get("told", 0)),
        "hops_ms": _hops_ms(played),
        "verify_ms": _percentiles(verify["steps_ms"]),
        "draft_step_ms": _percentiles(played.draft["steps_ms"]),
        "bytes_a_round": {
            "to_drafter": _mean(played.draft["round_bytes"]),
            "to_verify": sum(played.draft["proposal_bytes"]) / max(1, len(played.draft["round_bytes"])),
        },
    }


def _grpc_ms(played: Played) -> list[float]:
    """Time between the services' hands in each fresh proposal's round trip: the frame there and the frame back.

    The first ones are left out, as from the rate: a round waits there while the drafter reads other sessions' prompts.
    """
    sent, came, trips = played.verify["sent_ns"], played.verify["came_ns"], played.draft["trips"]
    return [
        (round_came - sent[round_key] + came[frame_key] - frame_sent) / 1e6
        for round_key, round_came, frame_key, frame_sent in trips[int(WARM_SHARE * len(trips)) :]
        if round_key in sent and frame_key in came
    ]


def _hops_ms(played: Played) -> dict[str, float]:
    """Medians, by hop."""
    found = [round.hops_ms() for round in rounds(played.verify, played.draft)]
    return {name: float(np.median([hops[name] for hops in found])) for name in found[0]} if found else {}


def _percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(values, q)) if values else float("nan") for q in (50, 99)}


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0


if __name__ == "__main__":
    raise SystemExit(as_command("wire"))
