"""Prints what pip must install for the extras named, from pyproject.toml: images keep that in a layer of its own."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

_OURSELVES = re.compile(r"outrider\[(.+)\]")


def requirements(project: dict[str, dict[str, list[str]]], extras: list[str]) -> list[str]:
    """The core's, then those of each extra, with extras of extras. KeyError for one that there is not."""
    wanted = list(project["dependencies"])
    for extra in extras:
        for requirement in project["optional-dependencies"][extra]:
            ours = _OURSELVES.fullmatch(requirement)
            wanted += requirements(project, ours[1].split(",")) if ours else [requirement]
    return list(dict.fromkeys(wanted))


if __name__ == "__main__":
    path, extras = Path(sys.argv[1]), [extra for extra in sys.argv[2].split(",") if extra]
    print("\n".join(requirements(tomllib.loads(path.read_text(encoding="utf-8"))["project"], extras)))
