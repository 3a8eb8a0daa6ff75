"""What is put in its place is on the disk before its name is."""

from __future__ import annotations

import errno
import os
import sys
import threading
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from engine.whole import flushed, locked, put_in_place
from tests.engine.disk import Disk


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_a_file(tmp_path: Path, disk: Disk) -> None:
    (tmp_path / "old").write_text("old")
    (tmp_path / "new").write_text("new")
    put_in_place(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_text() == "new"
    disk.check(tmp_path / "old")


def test_a_folder(tmp_path: Path, disk: Disk) -> None:
    (tmp_path / "made").mkdir()
    for name in ("a", "b"):
        (tmp_path / "made" / name).write_text(name)
    put_in_place(tmp_path / "made", tmp_path / "final")
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    disk.check(tmp_path / "final")


def test_a_file_system_that_flushes_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", lambda _: refuse(errno.EINVAL))
    flushed(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda _: refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        flushed(tmp_path)


def test_one_has_a_lock_and_the_other_says_that_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    said: SimpleQueue[str] = SimpleQueue()
    # Not capsys: what is written while it reads can be lost.
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=said.put, flush=lambda: None))

    def second() -> None:
        with locked(tmp_path / ".lock", tmp_path / "thing"):
            order.append("second")

    thread = threading.Thread(target=second)
    with locked(tmp_path / ".lock", tmp_path / "thing"):
        thread.start()
        assert said.get() == f"Waiting for another process that is making {tmp_path / 'thing'}"
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
