"""Load on any OpenAI-compatible server: times to first and next token, tokens per second, accept length.

    outrider bench serve --url http://127.0.0.1:8000 --concurrency 1,8,32 --output serve.json --plot serve.png

Works alike against Outrider, vLLM, SGLang and llama.cpp's llama-server. docs/benchmarking.md defines each figure.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench._drive import NUM_PROMPTS_HELP, Batch, Plan, Result, drive, num_prompts
from bench._figures import SCHEMA, TABLE_HEAD, Figures, request_rows, table_row
from bench._flags import (
    counts,
    natural,
    not_below_zero,
    output_file,
    parser_of,
    positive,
    rates,
    request_fields,
    utf8,
)
from bench._load import Load, failures_told, model_of, open_client
from bench._main import as_command
from bench._output import write_json
from bench._plot import check_plot, plot_loads
from bench._prompts import Deck, Prompt, check_prompts, from_file, mt_bench, random_ids
from bench._stream import Asked
from outrider.flags import check_key, check_url


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = parser_of("serve", __doc__)
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the server; an OpenAI base URL will do (default: %(default)s)")
    add("--model", type=utf8, help="model to ask for; default: the first that the server has")
    add("--api-key", help="sent as a bearer token")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompts", type=Path, help="JSON Lines file of prompts; default: MT-bench's questions")
    source.add_argument(
        "--random-prompt-tokens", type=positive, metavar="N", help="prompts of N random tokens, to measure prefill"
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=counts, default=[1], help="requests at once, as 1,8,32 (default: 1)")
    load.add_argument("--request-rate", type=rates, help="requests a second at random moments, as 0.5,2")
    add("--num-prompts", type=positive, help=NUM_PROMPTS_HELP)
    add("--max-tokens", type=positive, default=128, help="most tokens of an answer (default: %(default)s)")
    add("--temperature", type=not_below_zero, default=0.0, help="of sampling (default: %(default)s)")
    add("--ignore-eos", action="store_true", help="every answer runs to --max-tokens")
    add("--extra-body", type=request_fields, default={}, metavar="JSON", help="more fields for each request")
    add(
        "--warm-up",
        type=natural,
        default=2,
        metavar="N",
        help="short requests at first (default: %(default)s)",
    )
    add("--seed", type=int, default=0, help="of random prompts and of the moments of sending")
    add("--output", type=output_file, help="file for the figures, as JSON")
    add("--plot", type=output_file, help="file for a picture of them (.png, .svg or .pdf)")
    args = parser.parse_args(argv)
    check_url("--url", args.url, "http://127.0.0.1:8000")
    if args.api_key is not None:
        check_key("--api-key", args.api_key)
    check_plot(args.plot, args.output)
    check_prompts(args.prompts, args.output)
    return args


def plan_of(args: argparse.Namespace, model: str) -> Plan:
    """The plan that the command line asks for."""
    asked = Asked(model, args.max_tokens, args.temperature, args.ignore_eos, args.extra_body)
    rated = [Load(request_rate=rate) for rate in args.request_rate or ()]
    loads = rated or [Load(concurrency) for concurrency in args.concurrency]
    sizes = [num_prompts(load, args.num_prompts) for load in loads]
    prompts: list[Prompt]
    if args.random_prompt_tokens:
        prompts = random_ids(sum(sizes), args.random_prompt_tokens, args.seed)
    else:
        prompts = from_file(args.prompts) if args.prompts else mt_bench()
    deck = Deck(prompts)
    batches = [Batch(load, deck.deal(size)) for load, size in zip(loads, sizes, strict=True)]
    return Plan(asked, batches, args.warm_up, args.seed)


async def measure(args: argparse.Namespace) -> tuple[str, list[Figures]]:
    """The model's name and each load's figures, which are printed and written as they come.

    StartupError when the server does not answer, or refuses.
    """
    with failures_told(args.url):
        async with open_client(args.url, api_key=args.api_key) as client:
            model = args.model or await model_of(client)
            results = await drive(client, plan_of(args, model), lambda results: report(args, model, results))
    return model, [row for row, _ in results]


def report(args: argparse.Namespace, model: str, results: Sequence[Result]) -> None:
    """Prints the newest row; writes all so far where they are wanted, so that who is stopped keeps them."""
    if len(results) == 1:
        print(TABLE_HEAD)
    print(table_row(results[-1][0]), flush=True)
    if args.output:
        write_json(args.output, document(args, model, results))


def document(args: argparse.Namespace, model: str, results: Sequence[Result]) -> dict[str, Any]:
    """The document for --output; docs/benchmarking.md describes it."""
    return {
        "schema": SCHEMA, "url": args.url, "model": model, "prompts": prompts_of(args),
        "max_tokens": args.max_tokens, "temperature": args.temperature, "ignore_eos": args.ignore_eos,
        "extra_body": args.extra_body, "seed": args.seed,
        "loads": [{**asdict(row), "requests": request_rows(done)} for row, done in results],
    }  # fmt: skip


def prompts_of(args: argparse.Namespace) -> str:
    """The prompts in words."""
    random = f"random, {args.random_prompt_tokens} tokens" if args.random_prompt_tokens else None
    return random or str(args.prompts or "mt_bench")


def main(argv: list[str] | None = None) -> int:
    """Prints the table as it grows; writes JSON and picture where asked."""
    args = parse(argv)
    model, rows = asyncio.run(measure(args))
    if args.plot:
        plot_loads(args.plot, {model: rows}, f"{prompts_of(args)}, up to {args.max_tokens} tokens")
    return 0


if __name__ == "__main__":
    raise SystemExit(as_command("serve"))
