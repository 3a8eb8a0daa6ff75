"""What speculation gains, beside what the two networks' own times promise: tau * T / (V + D).

    python -m bench.theory --per-category 1 --tokens 96 --speculative-algorithm=EAGLE3

MT-bench questions one at a time, each without speculation and with it, in turn, with no brake and no overlap. T is a
plain step's time, V a verify step's, D the drafter's for a round and tau the tokens of a round, all from the services'
metrics over the same answers; the gain is of decode speed as the client sees it. Other flags go to `serve`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from bench._server import free_port, serving
from bench._systems import Launch
from bench.mt_bench import WARM_UP, Answer, ask_outrider, choose
from outrider.scrape import Scrape, Span, fetch

_STARTUP_S = 300.0


@dataclass
class Side:
    """One way of decoding, summed over its answers. Seconds; calls are rounds of the drafter."""

    tokens: int = 0
    decode_s: float = 0.0
    steps: float = 0.0
    steps_s: float = 0.0
    committed: float = 0.0
    calls: float = 0.0
    calls_s: float = 0.0

    def add(self, answer: Answer, verify: Span, draft: Span) -> None:
        """One answer, and what both services' metrics moved by in its time."""
        self.tokens += answer.tokens - 1
        self.decode_s += answer.decode_s
        self.steps += verify.change("outrider_step_seconds_count", kind="decode")
        self.steps_s += verify.change("outrider_step_seconds_sum", kind="decode")
        self.committed += verify.change("outrider_spec_committed_tokens_total")
        self.calls += draft.change("outrider_draft_seconds_count")
        self.calls_s += draft.change("outrider_draft_seconds_sum")


@dataclass(frozen=True)
class Gain:
    """Times in milliseconds; gain, theory and share are ratios."""

    plain_ms: float
    verify_ms: float
    draft_ms: float
    accept_length: float
    gain: float
    theory: float
    share: float


def gain_of(plain: Side, speculative: Side) -> Gain:
    """From both sides' sums. A round is a step; its drafts are all the calls between two steps."""
    plain_ms = 1000 * plain.steps_s / plain.steps
    verify_ms = 1000 * speculative.steps_s / speculative.steps
    draft_ms = 1000 * speculative.calls_s / speculative.steps
    accept_length = speculative.committed / speculative.steps
    gain = (speculative.tokens / speculative.decode_s) / (plain.tokens / plain.decode_s)
    theory = accept_length * plain_ms / (verify_ms + draft_ms)
    return Gain(plain_ms, verify_ms, draft_ms, accept_length, gain, theory, gain / theory)


def main(argv: list[str] | None = None) -> int:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(prog="outrider bench theory", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--per-category", type=int, default=1, help="questions of each of the eight categories")
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an answer")
    parser.add_argument("--output", type=Path, help="file for the figures, as JSON")
    args, serve_flags = parser.parse_known_args(argv)
    found = gain_of(*_measured(args, serve_flags))
    cells = [f"{value:.2f}" for value in asdict(found).values()]
    print("| T, ms | V, ms | D, ms | accept length | gain | tau*T/(V+D) | share |\n" + "|---" * 7 + "|")
    print(f"| {' | '.join(cells)} |")
    if args.output:
        args.output.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
    return 0


def _measured(args: argparse.Namespace, serve_flags: list[str]) -> tuple[Side, Side]:
    with _served(serve_flags) as (client, verify_url, draft_url):
        systems = [(ask_outrider(client, speculate=on), Side()) for on in (False, True)]
        for ask, _ in systems:
            ask(WARM_UP, 16)
        for turn, question in enumerate(choose(args.per_category)):
            for ask, side in systems if turn % 2 else systems[::-1]:
                before = _scrape(verify_url), _scrape(draft_url)
                answer = ask(question["turns"][0], args.tokens)
                after = _scrape(verify_url), _scrape(draft_url)
                if answer.tokens > 1:
                    verify, draft = (Span(*pair) for pair in zip(before, after, strict=True))
                    side.add(answer, verify, draft)
        return systems[0][1], systems[1][1]


@contextmanager
def _served(serve_flags: list[str]) -> Iterator[tuple[httpx.Client, str, str]]:
    """A client of a server of our own, and the addresses of verify's metrics and of the drafter's."""
    port, metrics = free_port(), free_port()  # the drafter's metrics take the port after verify's
    flags = ["--disable-speculation-brake", f"--metrics-port={metrics}", *serve_flags]
    command = [sys.executable, "-P", "-m", "outrider", "serve", f"--port={port}", *flags]
    launch = Launch(command, {"OUTRIDER_ENABLE_SPEC_V2": "0"})
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(launch, port, Path(folder) / "serve.log", _STARTUP_S) as served,
        httpx.Client(base_url=served.url, timeout=600) as client,
    ):
        verify_url, draft_url = (f"http://127.0.0.1:{metrics + i}/metrics" for i in range(2))
        yield client, verify_url, draft_url


def _scrape(url: str) -> Scrape:
    return fetch(url, time.monotonic())


if __name__ == "__main__":
    sys.exit(main())
