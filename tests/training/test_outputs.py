"""Files that commands write: whole or not at all, and where a link leads."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from outrider.errors import StartupError
from training.outputs import write_file


def test_a_link_stays_one_and_a_pipe_gets_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    os.mkfifo(tmp_path / "far" / "pipe")
    reader = os.open(tmp_path / "far" / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for name in ("file", "pipe"):
        link = tmp_path / name
        link.symlink_to(tmp_path / "far" / name)
        write_file(link, "the figures", lambda path: path.write_text("{}"))
        assert link.is_symlink()
    assert (tmp_path / "far" / "file").read_text() == "{}"
    assert os.read(reader, 9) == b"{}"
    os.close(reader)


def test_nothing_stays_of_what_could_not_be_written(tmp_path: Path) -> None:
    def fill(path: Path) -> None:
        path.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "last.pt"
    path.write_text("old")
    with pytest.raises(StartupError, match=f"the checkpoint cannot be written to {path}: .*No space left"):
        write_file(path, "the checkpoint", fill)
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"last.pt": "old"}
