"""Watching what reaches the disk, and when."""

from __future__ import annotations

import os
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
