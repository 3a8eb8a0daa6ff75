"""Interpreters with only the packages of an image of deploy/docker, as pyproject.toml's extras name them."""

from __future__ import annotations

import functools
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
HIDE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}: the image has none", name=name)

sys.meta_path.insert(0, Hidden())
"""


@functools.cache
def hiding_all_but(*extras: str) -> str:
    """The beginning of a script that hides all installed packages but ours and those that these extras need."""
    printed = subprocess.run(
        [sys.executable, ROOT / "deploy" / "docker" / "requirements.py", ROOT / "pyproject.toml", ",".join(extras)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    needed = {"outrider"}
    for line in printed.stdout.splitlines():
        _add(Requirement(line), needed)
    found = metadata.packages_distributions()
    return HIDE.format(
        names={name for name, owners in found.items() if not needed & set(map(canonicalize_name, owners))}
    )


def _add(requirement: Requirement, needed: set[str]) -> None:
    """Adds the distribution that is installed for a requirement, and all that it needs."""
    name = canonicalize_name(requirement.name)
    if name in needed:
        return
    needed.add(name)
    for line in metadata.requires(name) or ():
        inner = Requirement(line)
        if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)):
            _add(inner, needed)
