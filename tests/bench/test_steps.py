"""`outrider bench steps`: steps are taken one by one, and each has its parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import steps
from outrider.errors import StartupError
from tests.training import rig


@pytest.mark.parametrize("more", [[], ["--chunked-prefill-size=2"]])  # with which all have begun long after the first
def test_each_setting_has_its_row(more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "STEPS", 4)
    output = tmp_path / "steps.json"
    target = rig.make_target(tmp_path / "target")
    words = [
        "--batch",
        "1,3",
        "--context",
        "8",
        "--output",
        str(output),
        f"--model-path={target}",
        "--threads=1",
        *more,
    ]
    assert steps.main(words) == 0
    rows = json.loads(output.read_text(encoding="utf-8"))
    assert [(row["batch"], row["context"]) for row in rows] == [(1, 8), (3, 8)]
    for row in rows:
        assert row["step_ms"] >= row["model_ms"] > 0
        assert row["sampling_ms"] > 0
        assert row["scheduling_ms"] == pytest.approx(row["step_ms"] - row["model_ms"] - row["sampling_ms"])


def test_a_context_that_the_model_has_not_is_told_in_a_line(tmp_path: Path) -> None:
    target = rig.make_target(tmp_path / "target")
    with pytest.raises(StartupError, match=r"^--context is 100000: "):
        steps.main(["--batch=1", "--context=100000", f"--model-path={target}", "--threads=1"])
