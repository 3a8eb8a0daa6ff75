"""`outrider bench device` on two small networks: its figures, and its flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import device
from tests.engine.heads import make


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_figures(load_format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, head = make.write_target(tmp_path / "target"), make.eagle3(tmp_path / "head")
    output = tmp_path / "device.json"
    words = [
        "--model-path",
        str(target.folder),
        "--head",
        str(head.folder),
        f"--load-format={load_format}",
        "--device=cpu",
    ]
    words += ["--context=20", "--batch=2", "--nodes=3,6", "--num-steps=3", "--topk=2", "--seconds=0.01"]
    assert device.main([*words, f"--output={output}"]) == 0
    figures = json.loads(output.read_text())
    assert list(figures["plain"]) == list(figures["sampled"]) == ["1", "2"]
    assert [row["nodes"] for row in figures["rounds"]] == [3, 6]
    one = figures["plain"]["1"]["wall_ms"]
    for row in figures["rounds"]:
        assert row["round_ms"] == pytest.approx(row["verify"]["wall_ms"] + row["draft"]["wall_ms"])
        assert row["speedup"] == pytest.approx(3.69 * one / row["round_ms"])
    assert figures["roofline_share"] == pytest.approx(figures["floor_ms"] / one)
    said = capsys.readouterr().out
    assert all(words in said for words in ("of the roofline", "plain, 2 sessions", "sampled, 2 sessions"))


def test_one_folder_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        device.main(["--head", "."])
    assert "together" in capsys.readouterr().err
