"""Files of figures. What cannot be written is Unfinished, which ends a benchmark in a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.whole import written
from outrider.errors import Unfinished


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Unfinished for an OSError of the block, which writes `path`."""
    try:
        yield
    except OSError as error:
        raise Unfinished(f"{path} cannot be written: {error.strerror or error}") from error


def write_json(path: Path, value: Any, *, indent: int = 1) -> None:
    """Figures as JSON. A file has those that it had until it has these."""
    text = json.dumps(value, indent=indent) + "\n"
    with writing(path):
        written(path, lambda file: file.write_text(text, encoding="utf-8"))
