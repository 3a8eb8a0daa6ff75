"""Benchmarks as `python -m bench.NAME`: they say what is wrong as `outrider bench NAME` does, and where flags go."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import bench
from outrider import cli

FOLDER = Path(bench.__file__).parent
NAMES = [path.stem for path in sorted(FOLDER.glob("[!_]*.py"))]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """python -m"""
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parent, check=False)


def test_what_cannot_start_is_told_in_a_line() -> None:
    ended = run("bench.serve", "--url", "http://127.0.0.1:9")
    assert ended.returncode == 2
    assert ended.stderr == "outrider bench: no server answers at http://127.0.0.1:9: Connection refused\n"


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_ends_as_the_command_does(name: str) -> None:
    ending = f'if __name__ == "__main__":\n    raise SystemExit(as_command("{name}"))\n'
    assert (FOLDER / f"{name}.py").read_text().endswith(ending)


def test_words_that_no_server_takes_end_it_before_anything_is_measured() -> None:
    ended = run("bench.shipped", "--outpt", "x")
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("outrider serve: error: unrecognized arguments: --outpt")
    assert "Traceback" not in ended.stderr


def shown(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """A benchmark's help, on one line."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", name, "--help"])
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", ["early", "mt_bench", "shipped", "speculative", "theory"])
def test_help_says_where_other_flags_go(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(name, capsys).endswith("Other flags, and all after --, go to `outrider serve`.")


def test_help_has_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    said = shown("serve", capsys)
    for default in ("http://127.0.0.1:8000", "1", "128", "0.0"):
        assert f"(default: {default})" in said
    assert "speeds.json)" in shown("shipped", capsys)
