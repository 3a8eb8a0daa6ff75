"""Decode speed on MT-bench through the whole path, beside `transformers` generate in the same run.

    python -m bench.mt_bench --per-category 2 --tokens 128 --output mt_bench.json

For each question, in turn: transformers (bf16, greedy), Outrider without speculation, Outrider with it. The order
changes from question to question, so that a slow moment of the machine falls on each alike. Figures are decode tokens
per second, from the first token's arrival to the last's; only their ratios mean something, which are taken within each
question. One with an answer of fewer than 9 tokens is left out. Counted besides: answers that speculation changed,
which in fp32 must be none, and in bf16 is what batches of other sizes round differently.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from bench._flags import SERVE_EPILOG, output_file, own_and_other, parser_of, positive
from bench._load import failures_told
from bench._main import as_command
from bench._output import write_json
from bench._prompts import Prompt, mt_bench
from bench._serve_flags import check_serve_flags
from bench._server import ours_serving
from bench._stream import Heard, refusal

WARM_UP = "Say hello."
_ROUTE = "/v1/chat/completions"
FEWEST_TOKENS = 9  # of an answer whose speed counts


@dataclass(frozen=True)
class Result:
    """One answer of one system."""

    system: str
    category: str
    question_id: int
    tokens: int
    decode_s: float
    accept_length: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Decode speed."""
        return (self.tokens - 1) / self.decode_s


@dataclass(frozen=True)
class Said:
    """The text that a system said, and in which time."""

    text: str
    tokens: int
    decode_s: float
    accept_length: float | None = None


Ask = Callable[[str, int], Said]


def ask_outrider(client: httpx.Client, *, speculate: bool) -> Ask:
    """Streams a chat answer. ServerRefused for an error."""

    def ask(text: str, max_tokens: int) -> Said:
        body = {
            "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": max_tokens,
            "stream": True, "stream_options": {"include_usage": True}, "speculative": {"enabled": speculate},
        }  # fmt: skip
        heard = Heard(_ROUTE)
        with client.stream("POST", _ROUTE, json=body) as response:
            if response.status_code != 200:
                raise refusal(_ROUTE, response.status_code, response.read())
            for piece in response.iter_bytes():
                heard.take(piece)
        heard.check()
        _, tokens = heard.token_counts
        first = (heard.chunk_times or [heard.ended])[0]
        accept_length = heard.usage["speculation"]["accept_length"] if speculate else None
        return Said(heard.text, tokens, heard.ended - first, accept_length)

    return ask


def ask_transformers(model_path: str) -> Ask:
    """transformers' greedy generate in bf16; its first token's time is taken from a streamer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.generation.streamers import BaseStreamer

    tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16, local_files_only=True)
    model = loaded.eval()

    class Clock(BaseStreamer):
        """Notes when tokens come; the first call is the prompt."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: object) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def ask(text: str, max_tokens: int) -> Said:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        clock = Clock()
        with torch.inference_mode():
            whole = model.generate(
                **ids, do_sample=False, max_new_tokens=max_tokens, streamer=clock, pad_token_id=tokenizer.eos_token_id
            )
        said = tokenizer.decode(whole[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        return Said(said, len(clock.times) - 1, clock.times[-1] - clock.times[1])

    return ask


def choose(per_category: int) -> list[Prompt]:
    """The first questions of each category, one category after the other."""
    taken: dict[str, list[Prompt]] = defaultdict(list)
    for question in mt_bench():
        taken[question.category].append(question)
    return [question for questions in taken.values() for question in questions[:per_category]]


@dataclass
class Differences:
    """Answers that are not the same with speculation as without, of how many, and how many tokens these have."""

    answers: int = 0
    differing: int = 0
    tokens: int = 0

    def count(self, plain: Said, speculative: Said) -> None:
        """Takes in one question's answers."""
        self.answers += 1
        self.differing += plain.text != speculative.text
        self.tokens += plain.tokens


def measure(systems: dict[str, Ask], questions: list[Prompt], max_tokens: int) -> tuple[list[Result], Differences]:
    """Every system answers every question. Results are of the questions to which all answers are long enough."""
    for ask in systems.values():
        ask(WARM_UP, 16)
    results: list[Result] = []
    differences = Differences()
    names = list(systems)
    for turn, question in enumerate(questions):
        answers: dict[str, Said] = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            answers[name] = systems[name](question.text, max_tokens)
        if min(answer.tokens for answer in answers.values()) >= FEWEST_TOKENS:
            about = question.category, int(question.name)
            for name in names:
                answer = answers[name]
                results.append(Result(name, *about, answer.tokens, answer.decode_s, answer.accept_length))
        differences.count(answers["plain"], answers["speculative"])
        print(f"{turn + 1}/{len(questions)} {question.category}", file=sys.stderr)
    return results, differences


def answer_tokens(text: str) -> int:
    """Reads a flag: tokens of an answer that has a speed."""
    value = positive(text)
    if value < FEWEST_TOKENS:
        raise argparse.ArgumentTypeError(f"{value}; answers of fewer than {FEWEST_TOKENS} tokens have no speed")
    return value


def table(results: list[Result]) -> str:
    """Markdown: by category the medians of decode speed and of its ratio to the first system's, and accept length."""
    systems = list(dict.fromkeys(result.system for result in results))
    lines = ["| category | " + " | ".join(systems) + " | accept length |", "|---" * (len(systems) + 2) + "|"]
    categories = list(dict.fromkeys(result.category for result in results))
    for category in [*categories, "all"]:
        rows = [result for result in results if category in (result.category, "all")]
        speeds = [[result.tokens_per_s for result in rows if result.system == name] for name in systems]
        accepts = [result.accept_length for result in rows if result.accept_length]
        cells = [_cell(of_system, speeds[0]) for of_system in speeds]
        accept_length = f"{statistics.mean(accepts):.2f}" if accepts else ""
        lines.append(f"| {category} | " + " | ".join(cells) + f" | {accept_length} |")
    return "\n".join(lines)


def _cell(speeds: list[float], first: list[float]) -> str:
    """Medians over the same questions."""
    ratio = statistics.median(a / b for a, b in zip(speeds, first, strict=True))
    return f"{statistics.median(speeds):.1f} ({ratio:.2f}x)"


def main(argv: list[str] | None = None) -> int:
    """Runs the comparison."""
    parser = parser_of("mt_bench", __doc__, epilog=SERVE_EPILOG)
    parser.add_argument("--per-category", type=positive, default=2, help="questions of each of the eight categories")
    parser.add_argument("--tokens", type=answer_tokens, default=128, help="most tokens of an answer")
    parser.add_argument("--alone", action="store_true", help="leave transformers out")
    parser.add_argument("--output", type=output_file, help="file for all results, as JSON")
    args, serve_flags = own_and_other(parser, argv)
    check_serve_flags(serve_flags)
    questions = choose(args.per_category)
    with (
        ours_serving(serve_flags) as served,
        failures_told(served.url),
        httpx.Client(base_url=served.url, timeout=600, trust_env=False) as client,
    ):
        model_path = client.get("/get_model_info").json()["model_path"]
        systems = {} if args.alone else {"transformers": ask_transformers(model_path)}
        systems |= {"plain": ask_outrider(client, speculate=False), "speculative": ask_outrider(client, speculate=True)}
        results, differences = measure(systems, questions, args.tokens)
    if not results:
        print(f"bench mt_bench: no question has answers of {FEWEST_TOKENS} tokens from all", file=sys.stderr)
        return 1
    if args.output:
        rows = [asdict(result) | {"tokens_per_s": round(result.tokens_per_s, 2)} for result in results]
        write_json(args.output, rows)
    print(table(results))
    changed = f"{differences.differing} of {differences.answers} answers"
    print(f"{changed} change with speculation ({differences.tokens} tokens)")
    return 0


if __name__ == "__main__":
    raise SystemExit(as_command("mt_bench"))
