"""Workers: a file of ours run by a Python of its own, apart from the current folder and the user's environment.

That Python finds its own library and, after it, the packages that the worker is given, where this process has them:
they may lie in the user's folder or on PYTHONPATH, which it does not read. Workers import nothing of ours.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

_START = "import runpy, sys; sys.path += {folders!r}; runpy.run_path({file!r}, run_name='__main__')"


def command(worker: ModuleType, *words: str, packages: tuple[ModuleType, ...]) -> list[str]:
    """The words that start a worker. packages: all that it imports, and what those import."""
    folders = [_folder(package) for package in packages]
    code = _START.format(folders=[*dict.fromkeys(folders)], file=str(Path(str(worker.__file__)).absolute()))
    return [sys.executable, "-I", "-S", "-c", code, *words]


def _folder(package: ModuleType) -> str:
    """Where the package was found."""
    return str(Path(str(package.__file__)).absolute().parents[1])
