"""The folder of a server's sockets: private, short, and removed by the next server where its own was killed."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import StartupError
from outrider.runtime_dir import runtime_dir

HOLDER = """
from outrider.errors import StartupError
from outrider.runtime_dir import runtime_dir
with runtime_dir() as folder:
    print(folder, flush=True)
    input()
"""


@pytest.mark.parametrize("name", ["x" * 100, "a,b", "a#b", "a?b", "a%20b", "a\udcff"])
def test_it_is_private_and_one_that_can_be_dialled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    unfit = tmp_path / name
    unfit.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(unfit))
    with runtime_dir() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert not folder.is_relative_to(unfit)
        assert len(f"{folder}/verify.sock") < 108
    assert not folder.exists()


def test_where_only_one_place_can_be_written_it_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with runtime_dir() as folder:
        assert folder.is_relative_to(tmp_path)


def test_a_place_that_takes_a_folder_but_no_file_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    places = [tmp_path / "full", tmp_path / "next"]
    for place in places:
        place.mkdir()
    opened = Path.open

    def full(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.is_relative_to(places[0]):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(places[0]))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(places[1]))
    with runtime_dir() as folder:
        assert folder.parent == places[1]
    assert [*places[0].iterdir(), *places[1].iterdir()] == []


def test_that_there_is_no_place_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args: object, **kwargs: object) -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(StartupError, match="no folder for sockets"), runtime_dir():
        pass


def test_that_of_a_killed_server_is_removed_by_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    other = tmp_path / "outrider-files"  # of somebody's own
    other.mkdir()
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        held = Path(holder.stdout.readline().strip())
        try:
            with runtime_dir() as ours:
                assert set(tmp_path.iterdir()) == {held, ours, other}
        finally:
            holder.kill()
    with runtime_dir() as ours:
        assert set(tmp_path.iterdir()) == {ours, other}
