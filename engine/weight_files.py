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
WEIGHTS_KEY = "transformers_weights"
"""Of config.json: the file, or the index, that is read whatever else there is."""
# What a trainer leaves beside its weights.
_NO_WEIGHTS = ("training_args.bin", "optimizer.*", "scheduler.*", "scaler.*", "rng_state*")


def weight_files(folder: Path, *, load_format: str) -> list[Path]:
    """Safetensors files (`auto`, `safetensors`), or pickled ones (`pt`), found as transformers finds them.

    A file or an index that config.json names (WEIGHTS_KEY) comes before all others. Of pickled ones without
    their usual names all are taken that match the first of PICKLED_PATTERNS that any does. Raises StartupError where
    there are none, and for one that is a pipe, a pointer, a link to nothing.
    """
    if (named := read_json(folder / "config.json", missing_ok=True).get(WEIGHTS_KEY)) is not None:
        files = _named_by_config(folder, named, load_format)
    elif load_format == "pt":
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
    return _indexed(folder, index, Path(whole).suffix) if os.path.lexists(index) else []


def _named_by_config(folder: Path, named: object, load_format: str) -> list[Path]:
    """The file that config.json names, or those of the index that it names: safetensors alone, as in transformers."""
    what, suffix = f"{folder / 'config.json'}: {WEIGHTS_KEY} is {named!r}", Path(WEIGHTS_NAME).suffix
    if not isinstance(named, str) or not named.endswith((suffix, f"{suffix}.index.json")) or not _is_within(named):
        raise StartupError(f"{what}; it must name a {suffix} file of its folder, or an index")
    if load_format == "pt":
        raise StartupError(f"{what}, which --load-format pt does not read; leave it at auto")
    return [folder / named] if named.endswith(suffix) else _indexed(folder, folder / named, suffix)


def _is_within(name: str) -> bool:
    return name.isprintable() and not name.startswith("/") and ".." not in name.split("/")


def _indexed(folder: Path, index: Path, suffix: str) -> list[Path]:
    """Files that an index names, which it does from the model's folder on, wherever it lies itself."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise StartupError(f"{index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if not name.endswith(suffix) or not _is_within(name):
            raise StartupError(f"{index} names {name!r}, which is no {suffix} file of its folder")
    return [folder / name for name in names]
