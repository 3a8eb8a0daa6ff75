"""What a useless drafter costs: plain decoding beside a drafter that is always wrong, in the same two services.

    outrider bench useless --batch 1,8,32 --turns 5 --output useless.json

Verify is `outrider verify` with the embedded model, or --model-path's. The drafter is the draft service over chains of
tokens that no text has, said to be near certain; --draft-ms burns so much CPU time in each of its calls, as a model
would on the cores that verify computes on. --drafter ngram takes `outrider draft` with a trie of each session's own
text instead. Each turn runs the same prompts without speculation and with it; ratios are taken within a turn.

    batches.N.planned.over_plain.median    tokens/s of N streams over those without speculation; 0.95 or more holds
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import uvloop

from bench._flags import counts, not_below_zero, output_file, parser_of, positive, refuse_given, setting
from bench._main import as_command
from bench._output import write_json
from bench._pairs import PLAIN, PLANNED, TurnLoad, compare, prompts, table


def main(words: list[str] | None = None) -> int:
    """Prints the table; writes JSON where asked."""
    args = _parse(words)
    result = {"setting": setting(args), **uvloop.run(_measure(args))}
    if args.output is not None:
        write_json(args.output, result)
    print(table(result, PLAIN.name))
    return 0


def _parse(words: list[str] | None) -> argparse.Namespace:
    parser = parser_of("useless", __doc__)
    parser.add_argument("--batch", type=counts, default=[1, 8, 32], help="numbers of streams")
    parser.add_argument("--turns", type=positive, default=5, help="how often both ways are run")
    parser.add_argument("--max-tokens", type=positive, default=64, help="tokens of an answer")
    parser.add_argument("--drafter", choices=("wrong", "ngram"), default="wrong")
    parser.add_argument("--draft-ms", type=not_below_zero, help="CPU time of a wrong drafter's call; default: 0")
    parser.add_argument("--threads", type=positive, default=2, help="of verify's forward pass")
    parser.add_argument("--model-path", type=Path, help="the target; default: the embedded model")
    parser.add_argument("--output", type=output_file, help="JSON file")
    args = parser.parse_args(words)
    if args.drafter == "ngram":
        refuse_given(parser, args, ["draft_ms"], "is for --drafter wrong")
    return args


async def _measure(args: argparse.Namespace) -> dict[str, Any]:
    from engine.embedded import ensure_embedded_model

    model = args.model_path or ensure_embedded_model()
    with tempfile.TemporaryDirectory(prefix="oru-") as folder:
        address = f"unix:{folder}/verify"
        verify = (
            "outrider", "verify", f"--listen={address}", f"--model-path={model}", f"--threads={args.threads}",
            f"--max-running-requests={max(args.batch)}",
        )  # fmt: skip
        draft = ("bench._wrong_draft", address, str(args.draft_ms or 0.0))
        if args.drafter == "ngram":
            draft = (
                "outrider", "draft", f"--listen=unix:{folder}/draft", f"--verify-address={address}",
                "--speculative-algorithm=NGRAM", "--speculative-ngram-scope=session",
            )  # fmt: skip
        load = TurnLoad(args.batch, args.max_tokens, args.turns)
        return await compare(verify, draft, address, prompts(model), [PLAIN, PLANNED], load)


if __name__ == "__main__":
    raise SystemExit(as_command("useless"))
