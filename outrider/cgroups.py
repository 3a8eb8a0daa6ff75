"""The control groups that bound this process: in a container /proc shows the whole host, and not its own limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def groups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Folders of this process's groups that a controller may have a limit in, and of those around them.

    controller: `memory`, `cpu`. root: where /proc and /sys are.
    """
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / (controller if controllers else "")
            folder = top / path.strip("/")
            # Inside a container the path is the host's, and the group itself is mounted at the top.
            yield from (place for place in (folder, *folder.parents) if place.is_relative_to(top) and place.is_dir())


def text_of(path: Path) -> str:
    """The text of a group's file; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
