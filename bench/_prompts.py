"""What a load generator asks: MT-bench's questions, a file of prompts, or random token ids."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench._flags import read_json
from outrider.errors import StartupError
from training.args import MT_BENCH

# Whole words of every common vocabulary lie here, its special tokens do not.
RANDOM_IDS = range(1000, 30_000)


@dataclass(frozen=True)
class Prompt:
    """One request: `messages` for chat, or `ids`, a prompt of bare tokens, for completions."""

    name: str
    category: str
    messages: tuple[dict[str, Any], ...] = ()
    ids: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The text with which a chat begins."""
        return self.messages[0]["content"]


def mt_bench() -> list[Prompt]:
    """First turns of MT-bench's 80 questions, one of each category in turn, so that any stretch is a fair sample."""
    by_category: dict[str, list[Prompt]] = {}
    for question in _json_lines(MT_BENCH):
        prompt = Prompt(str(question["question_id"]), question["category"], _user(question["turns"][0]))
        by_category.setdefault(prompt.category, []).append(prompt)
    return [prompt for row in zip(*by_category.values(), strict=True) for prompt in row]


def from_file(path: Path) -> list[Prompt]:
    """Prompts of a JSON Lines file, each with `messages`, `turns` (the first is asked) or `prompt`.

    StartupError for a file that cannot be read, and for a line with none of them.
    """
    prompts: list[Prompt] = []
    for number, row in enumerate(_json_lines(path), 1):
        if isinstance(row, dict) and isinstance(row.get("messages"), list):
            messages = tuple(row["messages"])
        elif isinstance(row, dict) and isinstance(text := row.get("prompt", _first(row.get("turns"))), str):
            messages = _user(text)
        else:
            raise StartupError(f"{path}:{number}: a prompt is an object with `messages`, `turns` or `prompt`")
        prompts.append(Prompt(str(row.get("id", number)), str(row.get("category", "all")), messages))
    if not prompts:
        raise StartupError(f"{path} holds no prompt")
    return prompts


def check_prompts(path: Path | None, output: Path | None) -> None:
    """StartupError where figures would take the place of the prompts."""
    if path and output and os.path.realpath(path) == os.path.realpath(output):
        raise StartupError(f"--output is {output}, which is the file of --prompts")


def _first(turns: object) -> object:
    return turns[0] if isinstance(turns, list) and turns else None


def random_ids(num_prompts: int, num_tokens: int, seed: int) -> list[Prompt]:
    """Prompts of `num_tokens` random ids each; none begins like another, so no prefix cache helps."""
    source = random.Random(seed)
    return [
        Prompt(f"random {index}", "random", ids=tuple(source.choices(RANDOM_IDS, k=num_tokens)))
        for index in range(num_prompts)
    ]


class Deck:
    """Deals prompts so that none is asked twice until all have been: an answer must not be drafted from itself."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts
        self._next = 0

    def deal(self, count: int) -> list[Prompt]:
        """The next `count`; begins anew at the end."""
        dealt = [self._prompts[(self._next + index) % len(self._prompts)] for index in range(count)]
        self._next += count
        return dealt


def _user(text: str) -> tuple[dict[str, Any], ...]:
    return ({"role": "user", "content": text},)


def _json_lines(path: Path) -> Iterator[Any]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"prompts cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield read_json(line)
            except ValueError as error:
                raise StartupError(f"{path}:{number} is no JSON: {error}") from error
