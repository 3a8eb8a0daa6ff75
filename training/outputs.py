"""Where commands write: refused before any work is done when nothing can be written there."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from engine.whole import written
from outrider.errors import StartupError, Unfinished, reason_of


def made_folder(path: Path, what: str) -> Path:
    """The folder, made where there is none. StartupError when it is a file, or nothing can be written to it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise StartupError(f"{what} cannot be written to {path}: {reason_of(error)}") from error
    return path


def check_file(path: Path, what: str) -> None:
    """Makes the folder of a file that is to be written. StartupError when it cannot be."""
    if path.is_dir():
        raise StartupError(f"{what} cannot be written to {path}: it is a folder; it must be a file")
    if not (path.exists() and os.access(path, os.W_OK)):  # else it may be a pipe, in a folder that takes no other file
        made_folder(Path(os.path.realpath(path)).parent, what)


def write_file(path: Path, what: str, write: Callable[[Path], object]) -> None:
    """Has a file written, whole or not at all. Unfinished when it cannot be."""
    with writing(path, what):
        written(path, write)


@contextlib.contextmanager
def writing(path: Path, what: str) -> Iterator[None]:
    """Unfinished where what is written within cannot be."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch.save finds that its file is short, while it handles the error that says why
        cause = error if isinstance(error, OSError) else error.__context__ or error
        raise Unfinished(f"{what} cannot be written to {path}: {reason_of(cause)}") from error


def save(value: object, path: Path) -> None:
    """torch.save, which tells why it cannot write only of a file that Python opened."""
    with path.open("wb") as file:
        torch.save(value, file)
