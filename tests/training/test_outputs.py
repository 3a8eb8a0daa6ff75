"""Files that commands write: whole or not at all, and where a link leads."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from outrider.errors import Unfinished
from tests.engine.disk import FULL, full_disk
from training.checkpoints import Checkpoint
from training.outputs import check_file, write_file
from training.writer import Writer


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


def test_a_pipe_is_taken_where_no_other_file_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: pytest.fail(f"a file in {dir}"))
    check_file(tmp_path / "pipe", "the figures")


def test_what_killed_processes_left_of_a_file_is_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / f"last.pt.{gone.pid}.partial").touch()
    os.utime(tmp_path / f"last.pt.{gone.pid}.partial", (1, 1))
    (tmp_path / "last.pt.1.partial").touch()  # of one that runs
    write_file(tmp_path / "last.pt", "the checkpoint", lambda path: path.write_text("new"))
    assert {each.name for each in tmp_path.iterdir()} == {"last.pt", "last.pt.1.partial"}


def test_nothing_stays_of_what_could_not_be_written(tmp_path: Path) -> None:
    def fill(path: Path) -> None:
        path.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "last.pt"
    path.write_text("old")
    with pytest.raises(Unfinished, match=f"the checkpoint cannot be written to {path}: .*No space left"):
        write_file(path, "the checkpoint", fill)
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"last.pt": "old"}


@pytest.mark.parametrize("most_bytes", [100, 100_000, 400_000])
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, most_bytes: int) -> None:
    path = tmp_path / "last.pt"
    path.write_text("old")
    checkpoint = Checkpoint({}, {"a": torch.ones(100_000)}, torch.arange(2))
    with full_disk(most_bytes), pytest.raises(Unfinished, match=f"the checkpoint .* to {path}: .*{FULL}"):
        checkpoint.save(path)
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"last.pt": "old"}


def test_a_full_disk_is_told_in_a_line_where_curves_begin(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with full_disk(10), pytest.raises(Unfinished, match=f"the log for TensorBoard .* {tmp_path}/.*: .*{FULL}"):
        Writer(tmp_path, 0)
    assert capfd.readouterr() == ("", "")
