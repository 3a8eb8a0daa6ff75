"""What a file of a model folder is, before it is read: a file, and not what stands for one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from outrider.errors import StartupError, reason_of

_LFS_POINTER = b"version https://git-lfs"


def check_file(path: Path) -> None:
    """StartupError, which says what `path` is instead, unless it is a regular file; links are followed."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise StartupError(f"{path} is no file")
        with path.open("rb") as file:
            is_pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except FileNotFoundError:
        if path.is_symlink():
            raise StartupError(f"{path} is a link to {os.readlink(path)}, which does not exist") from None
        raise StartupError(f"{path} does not exist; the model needs it") from None
    except (OSError, ValueError) as error:  # links in a ring, names that no file can have
        raise StartupError(f"{path} cannot be read: {reason_of(error)}") from error
    if is_pointer:
        raise StartupError(
            f"{path} is a Git LFS pointer, not the file itself; `git lfs pull` in its folder fetches that"
        )
