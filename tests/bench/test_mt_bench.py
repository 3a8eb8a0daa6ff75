"""Figures of `bench mt_bench`: what the table says where a system has no answer that counts, and what is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import _prompts
from bench.mt_bench import Result, choose, table
from outrider.errors import StartupError


def test_a_system_without_an_answer_that_counts_has_an_empty_cell() -> None:
    results = [
        Result("transformers", "math", 1, 9, 1.0),
        Result("plain", "math", 1, 17, 1.0),
        Result("plain", "writing", 2, 17, 1.0),
        Result("speculative", "writing", 2, 33, 1.0, 2.0),
    ]
    assert table(results).splitlines()[2:] == [
        "| math | 8.0 (1.00x) | 16.0 (2.00x) | - |  |",
        "| writing | - | 16.0 | 32.0 | 2.00 |",
        "| all | 8.0 (1.00x) | 16.0 (2.00x) | 32.0 (4.00x) | 2.00 |",
    ]


def test_the_first_questions_of_each_category() -> None:
    questions = choose(2)
    assert [question.name for question in questions[:4]] == ["81", "82", "91", "92"]
    assert len(questions) == 16


def test_without_a_checkout_there_is_a_line_about_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_prompts, "QUESTIONS", tmp_path / "mt_bench.jsonl")
    with pytest.raises(StartupError, match="come with a checkout"):
        choose(1)
