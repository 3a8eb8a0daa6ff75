"""Whether a file is still the one that was read."""

from __future__ import annotations

from pathlib import Path


def file_stamp(path: str | Path) -> tuple[int, int, int]:
    """Changes when the file's contents do, or who may read it, even where its writer sets its time back. OSError."""
    status = Path(path).stat()
    return status.st_ctime_ns, status.st_ino, status.st_size
