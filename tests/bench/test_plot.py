"""Pictures of what the benchmarks found, and the step's parts as they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import goodput, layers, speculative
from bench._plot import plot_goodput, plot_grid, plot_parts
from outrider.errors import StartupError


def words(path: Path) -> str:
    """Text of an SVG picture, which matplotlib leaves as comments beside the letters' shapes."""
    return " ".join(re.findall(r"<!-- (.*?) -->", path.read_text()))


def test_the_parts_of_a_step_and_their_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, figures = tmp_path / "layers.svg", tmp_path / "layers.json"
    flags = ["--context", "16", "--tokens", "1,3", "--seconds", "0.01", "--no-onednn"]
    assert layers.main([*flags, "--output", str(figures), "--plot", str(picture)]) == 0
    written = json.loads(figures.read_text())
    assert (written["schema"], written["context"]) == ("outrider.bench.layers/1", 16)
    assert [step["tokens"] for step in written["steps"]] == [1, 3]
    for step in written["steps"]:
        assert step["total_ms"] == pytest.approx(sum(step["parts_ms"].values()))
        assert step["products_ms"] == pytest.approx(sum(step["parts_ms"][name] for name in layers.PRODUCTS))
        assert step["over_products"] == pytest.approx(step["total_ms"] / step["products_ms"])
    said = words(picture)
    assert all(name.replace("_", " ") in said for name in written["steps"][0]["parts_ms"])
    assert "1.25 times products" in said
    assert f"context {16}" in capsys.readouterr().out


def row(batch: int, steps: int, topk: int, tokens: int, speed: float) -> dict[str, Any]:
    """A line of `bench speculative`, as far as its picture shows it."""
    return {"batch_size": batch, "steps": steps, "topk": topk, "num_draft_tokens": tokens, "speed": speed}


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([row(1, 0, 0, 0, 70.0), row(1, 3, 1, 4, 120.0), row(4, 3, 4, 8, 40.0)],
         ["no speculation", "1 stream", "4 streams", "3 steps, topk 1", "3 steps, topk 4"]),
        ([row(1, 0, 0, 2, 70.0), row(1, 0, 0, 16, 60.0)], ["drafts", "draft tokens"]),
        ([row(8, 0, 0, 0, 70.0)], ["no speculation", "8 streams"]),
    ],
)  # fmt: skip
def test_a_grid_with_some_of_its_settings(rows: list[dict[str, Any]], says: Sequence[str], tmp_path: Path) -> None:
    plot_grid(tmp_path / "grid.svg", rows, "EAGLE3")
    assert all(word in words(tmp_path / "grid.svg") for word in [*says, "EAGLE3"])


def test_goodput_by_streams(tmp_path: Path) -> None:
    over = {"over_plain": {"median": 1.2, "least": 1.1, "most": 1.3}}
    batches = {"8": {"plain": {}, "planned": over, "3,1,4": over}, "16": {"plain": {}, "planned": over, "3,1,4": over}}
    plot_goodput(tmp_path / "goodput.svg", batches, "plain", "NGRAM")
    assert all(word in words(tmp_path / "goodput.svg") for word in ("plain", "planned", "3,1,4", "16", "NGRAM"))


def test_nothing_is_kept_of_a_picture_that_failed(tmp_path: Path) -> None:
    from matplotlib import pyplot

    with pytest.raises(KeyError):
        plot_parts(tmp_path / "parts.svg", {1: {"qkv": 1.0}}, {}, "")
    assert not pyplot.get_fignums()
    assert not (tmp_path / "parts.svg").exists()


@pytest.mark.parametrize("main", [layers.main, speculative.main, goodput.main])
def test_a_format_that_cannot_be_drawn_is_refused_at_once(main: Any) -> None:
    with pytest.raises(StartupError, match=r"--plot writes \.png, \.svg or \.pdf, not grid\.txt"):
        main(["--plot", "grid.txt"])
