"""The folder of a server's sockets, private to its user: there while the server runs, and removed with it.

Who is killed, or crashes, leaves one. The kernel lets go of its lock, and the next server of that user removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import IO

from outrider import env
from outrider.args.links import socket_fault
from outrider.errors import StartupError

_PREFIX = "outrider-"
_LOCK = "serve.lock"  # held for as long as the server runs


@contextlib.contextmanager
def runtime_dir() -> Generator[Path]:
    """A new folder that only this user may enter, with a path short enough for sockets in it."""
    folder, lock = _new_folder()
    with lock:
        _remove_left_behind(folder.parent)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _new_folder() -> tuple[Path, IO[str]]:
    """The folder and its lock, held; in the first place that takes both."""
    for base in _bases():
        if base is not None and base.is_dir() and not socket_fault(f"{base}/{_PREFIX}12345678/verify.sock"):
            with contextlib.suppress(OSError):  # not ours to write, or full; the next may be
                folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
                try:
                    return folder, _locked(folder)
                except OSError:
                    shutil.rmtree(folder, ignore_errors=True)
    raise StartupError("no folder for sockets: neither XDG_RUNTIME_DIR nor TMPDIR nor /tmp can be written")


def _locked(folder: Path) -> IO[str]:
    new = folder / f"new-{_LOCK}"
    lock = new.open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        new.rename(folder / _LOCK)  # which is seen locked from the first moment on
    except BaseException:
        lock.close()
        raise
    return lock


def _bases() -> Generator[Path | None]:
    yield env.runtime_dir()
    with contextlib.suppress(FileNotFoundError):  # none can be written
        yield Path(tempfile.gettempdir())
    yield Path("/tmp")


def _remove_left_behind(base: Path) -> None:
    """Removes this user's folders there whose servers are gone."""
    for folder in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, no such folder, locked, or just removed
            if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
                continue
            with (folder / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
