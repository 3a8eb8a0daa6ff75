"""The embedded model in fp32 says what transformers makes it say, token for token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.batch import Segment
from engine.model_folder import resolve_model
from engine.runner import ModelRunner

PROMPTS = [
    "What is the capital of France? Tell me one fact about it.",
    "Write a short story about a robot who learns to paint.",
    "def fibonacci(n):",
]
NUM_TOKENS = 64
# A product's last bits depend on how it is computed: a first difference counts only where the choice was clear.
CLEAR_MARGIN = 1e-5


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], list[int]]]:
    """Each prompt's ids, and what transformers says to it."""
    folder = resolve_model(None)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    answers: list[tuple[list[int], list[int]]] = []
    for prompt in PROMPTS:
        message = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )  # fmt: skip
        output = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)[0].tolist()
        ids = inputs["input_ids"][0].tolist()
        answers.append((ids, output[len(ids) :]))
    return answers


def greedy(runner: ModelRunner, prompt: list[int], end_ids: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """Plain decoding: tokens, and how far the first choice was ahead of the second."""
    said: list[int] = []
    margins: list[float] = []
    length, rows = 0, prompt
    while len(said) < NUM_TOKENS and not (said and said[-1] in end_ids):
        slots = runner.slot_table[0, length : length + len(rows)].copy()
        logits = runner.forward([Segment(0, length, np.array(rows, np.int32), slots)])[0]
        best, second = logits.topk(2).values.tolist()
        margins.append(best - second)
        length, rows = length + len(rows), [int(logits.argmax())]
        said += rows
    return said, margins


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["1", "0"])
def test_greedy(expected: list[tuple[list[int], list[int]]], kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CPU_KERNEL", kernel)
    runner = ModelRunner.load(resolve_model(None), dtype="float32", num_slots=512, max_sessions=1, max_len=512)
    runner.slot_table[0] = np.random.default_rng(0).permutation(512)
    for ids, theirs in expected:
        said, margins = greedy(runner, ids, runner.config.eos_token_ids)
        same = next((i for i, (a, b) in enumerate(zip(said, theirs, strict=False)) if a != b), len(said))
        assert said == theirs or margins[same] < CLEAR_MARGIN
