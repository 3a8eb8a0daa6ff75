"""What speculation gains, beside what the two networks' own times promise: tau * T / (V + D).

    python -m bench.theory --per-category 1 --tokens 96 --speculative-algorithm=EAGLE3

MT-bench questions one at a time, each without speculation and with it, in turn, with no brake and no overlap. T is a
plain step's time, V a verify step's, D the drafter's for a round and tau the tokens of a round, all from the services'
metrics over the same answers; the gain is of decode speed as the client sees it. Other flags go to `serve`.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass

from bench._flags import SERVE_EPILOG, output_file, own_and_other, parser_of, positive
from bench._main import as_command
from bench._metered import metered
from bench._output import write_json
from bench.mt_bench import WARM_UP, Said, answer_tokens, ask_outrider, choose
from outrider.scrape import Span


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

    def add(self, answer: Said, verify: Span, draft: Span) -> None:
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
    """Works the gain out from both sides' sums. A round is a step; its drafts are all the calls between two steps."""
    plain_ms = 1000 * plain.steps_s / plain.steps
    verify_ms = 1000 * speculative.steps_s / speculative.steps
    draft_ms = 1000 * speculative.calls_s / speculative.steps
    accept_length = speculative.committed / speculative.steps
    gain = (speculative.tokens / speculative.decode_s) / (plain.tokens / plain.decode_s)
    theory = accept_length * plain_ms / (verify_ms + draft_ms)
    return Gain(plain_ms, verify_ms, draft_ms, accept_length, gain, theory, gain / theory)


def main(argv: list[str] | None = None) -> int:
    """Measures and prints a table."""
    parser = parser_of("theory", __doc__, epilog=SERVE_EPILOG)
    parser.add_argument("--per-category", type=positive, default=1, help="questions of each of the eight categories")
    parser.add_argument("--tokens", type=answer_tokens, default=96, help="most tokens of an answer")
    parser.add_argument("--output", type=output_file, help="file for the figures, as JSON")
    args, serve_flags = own_and_other(parser, argv)
    found = gain_of(*_measured(args, serve_flags))
    if args.output:
        write_json(args.output, asdict(found))
    cells = [f"{value:.2f}" for value in asdict(found).values()]
    print("| T, ms | V, ms | D, ms | accept length | gain | tau*T/(V+D) | share |\n" + "|---" * 7 + "|")
    print(f"| {' | '.join(cells)} |")
    return 0


def _measured(args: argparse.Namespace, serve_flags: list[str]) -> tuple[Side, Side]:
    with metered(serve_flags, overlap=False) as served:
        systems = [(ask_outrider(served.client, speculate=on), Side()) for on in (False, True)]
        for ask, _ in systems:
            ask(WARM_UP, 16)
        for turn, question in enumerate(choose(args.per_category)):
            for ask, side in systems if turn % 2 else systems[::-1]:
                before = served.verify(), served.draft()
                answer = ask(question.text, args.tokens)
                after = served.verify(), served.draft()
                if answer.tokens > 1:
                    verify, draft = (Span(*pair) for pair in zip(before, after, strict=True))
                    side.add(answer, verify, draft)
        return systems[0][1], systems[1][1]


if __name__ == "__main__":
    raise SystemExit(as_command("theory"))
