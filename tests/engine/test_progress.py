"""Progress: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from engine.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("Fetching", unit="B") as progress:
        progress.at(512, 2048)
        progress.at(2048, 2048)
    assert "Fetching" in terminal.getvalue()
    assert "100%" in terminal.getvalue()


def test_lines_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("Converting") as progress:
        progress.at(1, 3)
    assert capsys.readouterr().err == "Converting ...\nConverting: done\n"


def test_what_failed_is_not_called_done(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="disk"), Progress("Converting"):
        raise OSError("disk full")
    assert "done" not in capsys.readouterr().err
