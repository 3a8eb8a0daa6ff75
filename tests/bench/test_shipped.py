"""What the table of shipped heads is made of."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import early, shipped
from bench._main import ended_by_signals
from bench.shipped import of_rows
from outrider.errors import StartupError


def row(question: int, system: str, speed: float, accept_length: float | None = None) -> dict[str, Any]:
    return {"question_id": question, "system": system, "tokens_per_s": speed, "accept_length": accept_length}


def test_speed_is_a_ratio_within_each_question() -> None:
    rows = [
        row(81, "plain", 100.0), row(81, "speculative", 200.0, 2.5), row(82, "speculative", 20.0, 1.5),
        row(82, "plain", 40.0),
    ]  # fmt: skip
    speed, accept_length = of_rows(rows)
    assert speed == pytest.approx(1.0)
    assert accept_length == 2.0


def test_a_run_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "ended", lambda command: 2)
    with pytest.raises(StartupError, match="bench mt_bench with NGRAM failed"):
        shipped._measured(argparse.Namespace(per_category=1, tokens=16), "NGRAM", [])


CHILD = """
import os, pathlib, signal, sys
def end(*told):
    pathlib.Path(sys.argv[1]).touch()
    raise SystemExit
signal.signal(signal.SIGTERM, end)
os.kill(os.getppid(), signal.SIGTERM)
while True:
    signal.pause()
"""


def test_a_run_ends_in_good_order_with_us(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path / "ended")]
    assert ended_by_signals(lambda words: shipped.ended(command), []) == 128 + signal.SIGTERM
    assert (tmp_path / "ended").exists()


@pytest.mark.parametrize("main", [early.main, shipped.main])
def test_the_drafter_is_the_benchmarks_to_choose(main: Callable[[list[str]], int]) -> None:
    with pytest.raises(StartupError, match=r"^--speculative-algorithm is not for this benchmark, which sets it"):
        main(["--speculative-algorithm=EAGLE3"])
