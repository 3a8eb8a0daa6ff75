"""What drafting ahead brings, by drafter: accept length of trees drafted early and of those drafted afresh.

    python -m bench.early --per-category 1 --tokens 96

Each drafter answers MT-bench questions one at a time with overlap always on and the brake off. A tree is early when it
was drafted before the token that it hangs below was known; the hit rate is the share of such among trees verified.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass

from bench._flags import SERVE_EPILOG, output_file, own_and_other, parser_of, positive
from bench._main import as_command
from bench._metered import metered
from bench._output import write_json
from bench._serve_flags import check_serve_flags
from bench.mt_bench import WARM_UP, answer_tokens, ask_outrider, choose
from engine.embedded import ensure_embedded_model
from engine.shipped import shipped_algorithms
from outrider.default_algorithm import USUAL
from outrider.scrape import Scrape, Span


@dataclass(frozen=True)
class Found:
    """One drafter's trees. Accept lengths count the bonus; None where there was no such tree."""

    algorithm: str
    hit_rate: float | None
    early: float | None
    fresh: float | None
    trees: int


def main(argv: list[str] | None = None) -> int:
    """Measures and prints a table."""
    parser = parser_of("early", __doc__, epilog=SERVE_EPILOG)
    parser.add_argument("--per-category", type=positive, default=1, help="questions of each of the eight categories")
    parser.add_argument("--tokens", type=answer_tokens, default=96, help="most tokens of an answer")
    parser.add_argument("--output", type=output_file, help="file for the figures, as JSON")
    args, serve_flags = own_and_other(parser, argv)
    check_serve_flags(serve_flags, "speculative_algorithm")
    every = [
        found(algorithm, *_measured(args, algorithm, serve_flags))
        for algorithm in (USUAL, *shipped_algorithms(ensure_embedded_model()))
    ]
    if args.output:
        write_json(args.output, [asdict(row) for row in every])
    print("| drafts | hit rate | accept length, early | fresh | trees |\n|---|---|---|---|---|")
    for row in every:
        print(f"| {row.algorithm} | {_cell(row.hit_rate)} | {_cell(row.early)} | {_cell(row.fresh)} | {row.trees} |")
    return 0


def found(algorithm: str, before: Scrape, after: Scrape) -> Found:
    """Works figures out from verify's metrics before the questions and after them."""
    span = Span(before, after)
    hits, misses = (span.change("outrider_overlap_total", result=result) for result in ("hit", "miss"))
    early, fresh = (
        1 + span.change("outrider_overlap_accepted_tokens_total", result=result) / count if count else None
        for result, count in (("hit", hits), ("miss", misses))
    )
    trees = hits + misses
    return Found(algorithm, hits / trees if trees else None, early, fresh, round(trees))


def _measured(args: argparse.Namespace, algorithm: str, serve_flags: list[str]) -> tuple[Scrape, Scrape]:
    with metered([f"--speculative-algorithm={algorithm}", *serve_flags], overlap=True) as served:
        ask = ask_outrider(served.client, speculate=True)
        ask(WARM_UP, 16)
        before = served.verify()
        for question in choose(args.per_category):
            ask(question.text, args.tokens)
        return before, served.verify()


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    raise SystemExit(as_command("early"))
