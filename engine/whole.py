"""Files and folders that appear whole or not at all, after a power cut too, and locks on who makes them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.stopping import tidied_when_stopped

_LEFT_S = 3600.0  # without a write, after which nobody is thought to write a file any more


@contextmanager
def locked(path: Path, making: Path | None = None) -> Iterator[None]:
    """Holds an exclusive lock; the kernel lets go of a dead process's. A wait for who is `making` something is told."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if making is not None:
                print(f"Waiting for another process that is making {making}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def written(path: Path, write: Callable[[Path], object]) -> None:
    """Has `write` fill a file, which has what it had until all is there; of a link, the one that it leads to."""
    target = Path(os.path.realpath(path))
    if (path.exists() and not path.is_file()) or not os.access(target.parent, os.W_OK):
        write(path)  # a pipe, or in a folder that takes no other file
        return
    _remove_left_behind(target)
    beside = target.with_name(f"{target.name}.{os.getpid()}.partial")  # several processes may write it at once
    try:
        write(beside)
        if target.exists():
            shutil.copymode(target, beside)
        put_in_place(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def _remove_left_behind(target: Path) -> None:
    """Removes what processes wrote of the file that were killed before it was whole.

    Another host or container that writes there has process ids of its own: what is new stays.
    """
    for partial in target.parent.glob(f"{glob.escape(target.name)}.*.partial"):
        number = partial.name.removesuffix(".partial").rpartition(".")[2]
        if number.isdecimal() and not Path(f"/proc/{number}").exists():
            with contextlib.suppress(FileNotFoundError):
                if time.time() - partial.stat().st_mtime > _LEFT_S:
                    partial.unlink()


@contextmanager
def work_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder in `parent`, removed at the end, of which SIGTERM is one too."""
    with tidied_when_stopped(), tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as name:
        yield Path(name)


def put_in_place(ready: Path, final: Path) -> None:
    """Renames a file, or a folder of files, once it is on the disk: a name never stands for half of it."""
    flushed(ready)
    os.replace(ready, final)
    flushed(final.parent, names_only=True)


def flushed(path: Path, *, names_only: bool = False) -> None:
    """Flushes to the disk a file's bytes, or a folder's names and, unless `names_only`, the bytes of its files."""
    if path.is_dir() and not names_only:
        for file in path.iterdir():
            flushed(file)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # by file systems that cannot
            raise
    finally:
        os.close(descriptor)
