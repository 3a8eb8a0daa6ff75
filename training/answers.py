"""Greedy answers of the target to a file of prompts: what accept length is measured on. Made once and kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.runner import ModelRunner
from training.chat_format import ChatFormat
from training.data.completer import Completer, Completion, Conversation
from training.data.given import read_first_turns
from training.data.store import Example
from training.outputs import write_file
from training.target_states import target_id


@dataclass(frozen=True, slots=True)
class Answer:
    """An answered prompt, and what kind of prompt it was."""

    category: str
    example: Example


def greedy_answers(
    path: Path, model_path: Path, *, dtype: str, device: str, load_format: str, threads: int | None, answer_tokens: int,
    max_prompts: int | None = None, kept: Path | None = None,
) -> list[Answer]:  # fmt: skip
    """The first turns of `path`, answered. `kept`: file that answers are read from, or written to."""
    prompts = read_first_turns(path)[:max_prompts]
    chat = ChatFormat.of_model(model_path)
    facts = {
        "prompts": [messages for _, messages in prompts],
        "answer_tokens": answer_tokens,
        "model": str(model_path),
        "target": target_id(model_path, load_format),
        "dtype": dtype,
    }
    if kept is not None and (found := _read(kept, facts)) is not None:
        return found
    asked = [chat.prompt(messages) for _, messages in prompts]
    max_len = max(map(len, asked)) + answer_tokens
    num_rows = min(32, len(asked))
    runner = ModelRunner.load(
        model_path, dtype=dtype, device=device, load_format=load_format, threads=threads, max_len=max_len,
        num_slots=(num_rows + 1) * max_len, max_sessions=num_rows,
    )  # fmt: skip
    conversations = [_answered(i, prompt, answer_tokens, chat.stops) for i, prompt in enumerate(asked)]
    tokens = dict(Completer(runner).run(iter(conversations)))
    answers = [_answer(prompts[i][0], len(asked[i]), tokens[i]) for i in range(len(asked))]
    if kept is not None:
        rows = [[a.category, a.example.answers[0][0], a.example.tokens.tolist()] for a in answers]
        text = json.dumps({"facts": facts, "answers": rows})
        write_file(kept, "the answers", lambda path: path.write_text(text, encoding="utf-8"))
    return answers


def _answered(index: int, prompt: list[int], max_tokens: int, stops: frozenset[int]) -> Conversation:
    done = yield Completion(prompt, max_tokens, stops, cuts_loops=False)
    return index, [*prompt, *done.tokens]


def _answer(category: str, start: int, tokens: Sequence[int]) -> Answer:
    return Answer(category, Example(np.array(tokens, np.int64), ((start, len(tokens)),), "eval"))


def _read(path: Path, facts: dict[str, Any]) -> list[Answer] | None:
    """Answers kept there, when they are the same target's to the same prompts; none of a file that is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return [_answer(*row) for row in found["answers"]] if found["facts"] == facts else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
