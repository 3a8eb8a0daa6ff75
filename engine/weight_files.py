"""Which files of a model folder hold its weights, each found to be a file. Knows nothing of what is in them."""

from __future__ import annotations

import os
from pathlib import Path

from outrider.errors import StartupError
from outrider.model_file import check_file
from outrider.text_files import read_json

WEIGHTS_NAME, PICKLED_NAME = "model.safetensors", "pytorch_model.bin"
INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
PICKLED_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# What a trainer leaves beside its weights.
_NO_WEIGHTS = ("training_args.bin", "optimizer.*", "scheduler.*", "scaler.*", "rng_state*")


def weight_files(folder: Path, *, load_format: str) -> list[Path]:
    """Safetensors files (`auto`, `safetensors`), or pickled ones (`pt`), found as transformers finds them.

    Of pickled ones without its names all that match the first of PICKLED_PATTERNS that any does. Raises StartupError
    where there are none, and for one that is a pipe, a pointer, a link to nothing.
    """
    if load_format == "pt":
        files = _named(folder, PICKLED_NAME) or pickled_files(folder)
        if not files:
            raise StartupError(
                f"{folder} has no pickled weights ({', '.join(PICKLED_PATTERNS)}), which pt asks for: --load-format, "
                "or of a draft model --speculative-draft-load-format where it is given; auto reads safetensors"
            )
    else:
        files = _named(folder, WEIGHTS_NAME)
        if not files:
            _refuse_without_safetensors(folder)
    for path in files:
        check_file(path)
    return files


def pickled_files(folder: Path) -> list[Path]:
    """Files that may be pickled weights by their names, of one pattern."""
    for pattern in PICKLED_PATTERNS:
        found = [path for path in sorted(folder.glob(pattern)) if not any(map(path.match, _NO_WEIGHTS))]
        if found:
            return found
    return []


def _refuse_without_safetensors(folder: Path) -> None:
    pickled = pickled_files(folder)
    if pickled:
        raise StartupError(
            f"{folder} has only pickled weights ({pickled[0].name}), which can run code when read. Convert them to "
            "safetensors (`outrider convert` does it for a draft head), or allow them with --load-format pt, a draft "
            "model's alone with --speculative-draft-load-format pt"
        )
    raise StartupError(f"{folder} has neither {WEIGHTS_NAME} nor {INDEX_NAME}")


def _named(folder: Path, whole: str) -> list[Path]:
    """The file of that name, else those that its index names: of both the whole one, as transformers does."""
    if os.path.lexists(folder / whole):
        return [folder / whole]
    index = folder / f"{whole}.index.json"
    return _indexed(index, Path(whole).suffix) if os.path.lexists(index) else []


def _indexed(index: Path, suffix: str) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise StartupError(f"{index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if not name.endswith(suffix) or not name.isprintable() or name.startswith("/") or ".." in name.split("/"):
            raise StartupError(f"{index} names {name!r}, which is no {suffix} file of its folder")
    return [index.parent / name for name in names]
