"""Watching what reaches the disk, and when, and disks that are full."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest


class Disk:
    """Notes what reaches the disk, by inode, and what is renamed, in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[int | str] = []
        fsync, replace = os.fsync, os.replace

        def noted_fsync(descriptor: int) -> None:
            self.events.append(os.fstat(descriptor).st_ino)
            fsync(descriptor)

        def noted_replace(source: Path, target: Path) -> None:
            self.events.append(target.name)
            replace(source, target)

        patch.setattr(os, "fsync", noted_fsync)
        patch.setattr(os, "replace", noted_replace)

    def check(self, final: Path) -> None:
        """All of `final` came to the disk before its name, and then the name did."""
        at = self.events.index(final.name)
        whole = [final, *final.iterdir()] if final.is_dir() else [final]
        assert {path.stat().st_ino for path in whole} <= set(self.events[:at])
        assert final.parent.stat().st_ino in self.events[at:]


FULL = "File too large"  # what is told where there is no more room on such a disk


@contextlib.contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    """No file becomes larger, nor what is written beyond its size: the nearest to a full disk that takes no root."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))  # Python ignores the signal that comes of it
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
