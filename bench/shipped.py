"""Speed of every drafter that comes with Outrider for its embedded model, and the table that `serve` chooses by.

    python -m bench.shipped --per-category 2 --tokens 128
    python -m bench.shipped --per-category 2 --tokens 128 --quantization=int8_dynamic

Runs bench.mt_bench for n-grams and for each shipped head. Speed is the geometric mean over questions of decode speed
with drafts by that without, in one run and in turn. The table, which has a section for targets as they are and one for
quantised ones, is written beside the heads; other flags go to `serve`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench._flags import SERVE_EPILOG, output_file, own_and_other, parser_of, positive
from bench._main import as_command
from bench._output import write_json
from bench._serve_flags import check_serve_flags
from bench.mt_bench import answer_tokens
from engine.embedded import ensure_embedded_model
from engine.shipped import shipped_algorithms
from outrider import env
from outrider.default_algorithm import SPEEDS, USUAL, section
from outrider.errors import StartupError


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a table and writes it."""
    parser = parser_of("shipped", __doc__, epilog=SERVE_EPILOG)
    parser.add_argument("--per-category", type=positive, default=2, help="questions of each of the eight categories")
    parser.add_argument("--tokens", type=answer_tokens, default=128, help="most tokens of an answer")
    parser.add_argument(
        "--output", type=output_file, default=str(SPEEDS), help="file for the table (default: %(default)s)"
    )
    args, serve_flags = own_and_other(parser, argv)
    served = check_serve_flags(serve_flags, "speculative_algorithm")
    measured = {
        algorithm: of_rows(_measured(args, algorithm, serve_flags))
        for algorithm in (USUAL, *shipped_algorithms(ensure_embedded_model()))
    }
    tables = json.loads(args.output.read_text(encoding="utf-8")) if args.output.is_file() else {}
    own_flags = "".join(f" {flag}" for flag in serve_flags)
    tables[section(quantized=served.quantization is not None)] = {
        "speeds": {algorithm: round(speed, 3) for algorithm, (speed, _) in measured.items()},
        "accept_lengths": {algorithm: round(length, 3) for algorithm, (_, length) in measured.items()},
        "command": f"python -m bench.shipped --per-category {args.per_category} --tokens {args.tokens}{own_flags}",
    }
    write_json(args.output, tables)
    print("| drafts | speed | accept length |\n|---|---|---|")
    for algorithm, (speed, accept_length) in measured.items():
        print(f"| {algorithm} | {speed:.2f}x | {accept_length:.2f} |")
    return 0


def of_rows(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Sums bench.mt_bench's rows up: speed with drafts as a multiple of that without, and the mean accept length."""
    by_question: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        by_question[row["question_id"]][row["system"]] = row
    pairs = by_question.values()
    speed = statistics.geometric_mean(
        found["speculative"]["tokens_per_s"] / found["plain"]["tokens_per_s"] for found in pairs
    )
    return speed, statistics.mean(found["speculative"]["accept_length"] or 1.0 for found in pairs)


def _measured(args: argparse.Namespace, algorithm: str, serve_flags: list[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        words = [f"--per-category={args.per_category}", f"--tokens={args.tokens}", "--alone", f"--output={output}"]
        flags = [f"--speculative-algorithm={algorithm}", *serve_flags]
        if ended([sys.executable, "-P", "-m", "bench.mt_bench", *words, *flags]) != 0:
            raise StartupError(f"bench mt_bench with {algorithm} failed")
        return json.loads(output.read_text(encoding="utf-8"))


def ended(command: list[str]) -> int:
    """Runs a command; its exit code. Whatever ends us meanwhile has it end too, in good order."""
    with subprocess.Popen(
        command, stdout=sys.stderr, env=env.for_child(), start_new_session=True,  # Ctrl-C is told to us alone
    ) as child:  # fmt: skip
        try:
            return child.wait()
        except KeyboardInterrupt:
            child.terminate()
            child.wait()
            raise


if __name__ == "__main__":
    raise SystemExit(as_command("shipped"))
