"""What is asked of the tensors of a model's files, whoever reads them. Knows no files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from outrider.errors import StartupError

EMBEDDING, OUTPUT_HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""The tensors' names in every model's files."""


def check_shapes(
    folder: Path, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], whose: str = ""
) -> None:
    """StartupError unless every wanted tensor is there in its shape; `whose` is said of missing ones."""
    refuse_tensors(folder, [name for name in wanted if name not in found], f"{whose}are missing")
    wrong = [
        f"{name} is {list(found[name])}, config.json calls for {list(shape)}"
        for name, shape in wanted.items()
        if found[name] != shape
    ]
    refuse_tensors(folder, wrong, "have the wrong shape")


def refuse_tensors(folder: Path, tensors: Sequence[str], what: str) -> None:
    """StartupError where there are any, the first five named."""
    if tensors:
        named = "; ".join(tensors[:5]) + (" ..." if len(tensors) > 5 else "")
        raise StartupError(f"{folder}: {len(tensors)} tensors {what}: {named}")
