"""`outrider bench layers`, over a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import layers
from outrider.errors import StartupError
from tests.engine.tiny import saved_model

folder = saved_model("llama")


def test_without_kernels_products_are_not_timed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CPU_KERNEL", "0")
    output, words = tmp_path / "layers.json", ["--context", "8", "--tokens", "2", "--seconds", "0.001", "--no-onednn"]
    assert layers.main(["--model-path", str(folder), *words, "--output", str(output)]) == 0
    (step,) = json.loads(output.read_text())["steps"]
    assert (step["products_ms"], step["over_products"]) == (0.0, None)
    assert step["total_ms"] > 0


def test_a_context_beyond_the_models_is_refused(folder: Path) -> None:
    with pytest.raises(StartupError, match=r"^--context 99999999 and a step of 4 tokens exceed the model's \d+ "):
        layers.main(["--model-path", str(folder), "--context", "99999999", "--tokens", "1,4"])
