"""Files of figures. What cannot be written is a StartupError, as is all else that ends a benchmark in a line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.whole import put_in_place
from outrider.errors import StartupError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """StartupError for an OSError of the block, which writes `path`."""
    try:
        yield
    except OSError as error:
        raise StartupError(f"{path} cannot be written: {error.strerror or error}") from error


def write_json(path: Path, value: Any, *, indent: int = 1) -> None:
    """Figures as JSON. A file has those that it had until it has these."""
    text = json.dumps(value, indent=indent) + "\n"
    target = Path(os.path.realpath(path))
    with writing(path):
        if (target.exists() and not target.is_file()) or not os.access(target.parent, os.W_OK):
            target.write_text(text, encoding="utf-8")  # a pipe, or in a folder that takes no other file
            return
        beside = target.with_name(f".outrider-{os.getpid()}")
        try:
            beside.write_text(text, encoding="utf-8")
            if target.exists():
                shutil.copymode(target, beside)
            put_in_place(beside, target)
        finally:
            beside.unlink(missing_ok=True)
