"""Whether a file is still the one that was read; and whether it is a file."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def check_regular(path: str | Path) -> None:
    """OSError for what is no regular file, links followed: to read a pipe would be to wait for it."""
    mode = Path(path).stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "It is no regular file", str(path))


def file_stamp(path: str | Path) -> tuple[int, int, int]:
    """Changes when the file's contents do, or who may read it, even where its writer sets its time back. OSError."""
    status = Path(path).stat()
    return status.st_ctime_ns, status.st_ino, status.st_size
