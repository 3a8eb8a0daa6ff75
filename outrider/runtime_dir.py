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

from outrider import env
from outrider.args.links import socket_fault
from outrider.errors import StartupError

_PREFIX = "outrider-"
_LOCK = "serve.lock"  # held for as long as the server runs


@contextlib.contextmanager
def runtime_dir() -> Generator[Path]:
    """A new folder that only this user may enter, with a path short enough for sockets in it."""
    folder = _new_folder()
    _remove_left_behind(folder.parent)
    new = folder / f"new-{_LOCK}"
    with new.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        new.rename(folder / _LOCK)  # which is seen locked from the first moment on
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _new_folder() -> Path:
    for base in _bases():
        if base is not None and base.is_dir() and not socket_fault(f"{base}/{_PREFIX}12345678/verify.sock"):
            try:
                return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
            except OSError:
                continue  # not ours to write; the next may be
    raise StartupError("no folder for sockets: neither XDG_RUNTIME_DIR nor TMPDIR nor /tmp can be written")


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
