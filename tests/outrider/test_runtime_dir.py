"""The folder of a server's sockets: private, short, and removed by the next server where its own was killed."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.runtime_dir import runtime_dir

HOLDER = """
from outrider.runtime_dir import runtime_dir
with runtime_dir() as folder:
    print(folder, flush=True)
    input()
"""


@pytest.mark.parametrize("name", ["x" * 100, "a,b", "a#b", "a?b", "a%20b"])
def test_it_is_private_and_one_that_can_be_dialled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    unfit = tmp_path / name
    unfit.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(unfit))
    with runtime_dir() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert not folder.is_relative_to(unfit)
        assert len(f"{folder}/verify.sock") < 108
    assert not folder.exists()


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
