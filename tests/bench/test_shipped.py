"""What the table of shipped heads is made of."""

from __future__ import annotations

import argparse
import subprocess
from typing import Any

import pytest

from bench import shipped
from bench.shipped import of_rows
from outrider.errors import StartupError


def row(question: int, system: str, speed: float, accept_length: float | None = None) -> dict[str, Any]:
    return {"question_id": question, "system": system, "tokens_per_s": speed, "accept_length": accept_length}


def test_speed_is_a_ratio_within_each_question() -> None:
    rows = [
        row(81, "plain", 100.0), row(81, "speculative", 200.0, 2.5), row(82, "speculative", 20.0, 1.5),
        row(82, "plain", 40.0), row(83, "plain", 70.0),
    ]  # fmt: skip
    speed, accept_length = of_rows(rows)
    assert speed == pytest.approx(1.0)
    assert accept_length == 2.0


def test_answers_that_are_all_too_short_have_no_speed() -> None:
    with pytest.raises(StartupError, match="no question has an answer with drafts and one without"):
        of_rows([row(81, "plain", 100.0), row(82, "speculative", 20.0, 1.5)])


def test_a_run_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, 2)

    monkeypatch.setattr(shipped.subprocess, "run", failing)
    with pytest.raises(StartupError, match="bench mt_bench with NGRAM failed"):
        shipped._measured(argparse.Namespace(per_category=1, tokens=16), "NGRAM", [])
