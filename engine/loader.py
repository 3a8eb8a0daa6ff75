"""From what the user named to checked weights: the model's folder, and the tensors that its config calls for.

No tensor is ever made up: a missing, extra or mis-shaped one is reported, never patched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.checkpoint import Checkpoint, DummyCheckpoint, check_numbers, open_checkpoint
from engine.config import ModelConfig
from engine.embedded import ensure_embedded_model
from engine.tensors import EMBEDDING, OUTPUT_HEAD, check_shapes
from engine.weight_files import PICKLED_PATTERNS
from outrider.errors import StartupError
from outrider.model_name import may_be_hub_id
from outrider.telemetry import get_logger

if TYPE_CHECKING:
    from engine.models.heads.target import TargetShape

HUB_PATTERNS = ("*.json", "*.jinja")
# Older exports carry the rotary table, which we compute.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
PREDICTION_PREFIX = "model.mtp_layers."

log = get_logger(__name__)


SECOND_COPIES = ["consolidated*", "*/*.safetensors"]
"""Of a hub id: weights once more, as their maker has them, or other models beside."""


def resolve_model(
    model: str | Path | None, *, revision: str | None = None, load_format: str = "auto", trust_remote_code: bool = False
) -> Path:
    """The local folder of a model: a folder as it is, a hub id fetched to the hub's cache, None the embedded default.

    Of a hub id only files that may be used are fetched: pickled ones for `pt`, no weights for `dummy`, code if trusted.
    Raises StartupError when there is none.
    """
    path = None if model is None else Path(model).expanduser()
    if revision is not None and (path is None or path.exists()):
        raise StartupError(f"--revision is of a hub id; the model is {path or 'the embedded one'}")
    if model is None or path is None:
        return ensure_embedded_model()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise StartupError(f"model path {path} is a file; a Hugging Face folder is needed")
    name = str(model)
    if not may_be_hub_id(name):
        raise StartupError(f"model path {model} does not exist")
    return _fetch(name, revision, hub_patterns(load_format, trust_remote_code))


def hub_patterns(load_format: str, trust_remote_code: bool) -> list[str]:
    """Names of the files of a hub id that may be used."""
    weights = {"pt": [*PICKLED_PATTERNS], "dummy": []}.get(load_format, ["*.safetensors"])
    return [*weights, *HUB_PATTERNS, *(["*.py"] if trust_remote_code else [])]


def _fetch(hub_id: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    download = partial(
        snapshot_download, hub_id, revision=revision, allow_patterns=patterns, ignore_patterns=SECOND_COPIES
    )
    return fetched(f"{hub_id!r} is no local folder", download)


def fetched(why: str, download: Callable[[], str]) -> Path:
    """What a call of huggingface_hub downloads. StartupError, which `why` begins, where it cannot."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(download())
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise StartupError(f"{why} and could not be fetched from the model hub: {error}") from error


def load_checkpoint(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], *, load_format: str = "auto", dtype: torch.dtype | None = None
) -> tuple[Checkpoint, Iterator[tuple[str, torch.Tensor]]]:
    """The checkpoint of `folder` and its tensors `(name, value as stored)`, exactly those of `shapes`.

    `load_format`: auto, safetensors, pt (pickled files, read with weights_only) or dummy (random, seeded). `dtype`:
    what will be computed in. Raises StartupError for missing or mis-shaped tensors (the first five are named) before
    any is read, and while iterating for one that is not finite, or would not be in `dtype`. Extra tensors are logged.
    """
    if load_format == "dummy":
        checkpoint: Checkpoint = DummyCheckpoint(shapes)
    else:
        checkpoint = open_checkpoint(folder, load_format=load_format)
    check_shapes(folder, checkpoint.shapes(), shapes)
    _warn_of_unused(folder, checkpoint.shapes(), shapes)
    _check_tied(folder, checkpoint, shapes)
    return checkpoint, _finite_tensors(folder, checkpoint, shapes, dtype)


def _warn_of_unused(folder: Path, found: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    extra = [name for name in found if name not in wanted and not name.endswith(IGNORED_SUFFIXES)]
    # A tied model's head is its embedding, and some files store it twice; prediction layers are a drafter's.
    extra = [name for name in extra if name != OUTPUT_HEAD and not name.startswith(PREDICTION_PREFIX)]
    if extra:
        log.warning("tensors not used", folder=str(folder), count=len(extra), first=extra[:5])


def _check_tied(folder: Path, checkpoint: Checkpoint, wanted: Mapping[str, object]) -> None:
    """StartupError where a model is tied by its config and not by its weights: which is meant, only its owner knows."""
    if OUTPUT_HEAD in wanted or not {OUTPUT_HEAD, EMBEDDING} <= checkpoint.shapes().keys():
        return
    head, embedding = checkpoint.tensor(OUTPUT_HEAD), checkpoint.tensor(EMBEDDING)
    if head.dtype != embedding.dtype or not torch.equal(head, embedding):
        raise StartupError(
            f"{folder}: {OUTPUT_HEAD} is not {EMBEDDING}, though config.json has tie_word_embeddings true. Set that to "
            "false for the head that is stored, or take it out of the weights"
        )


def _finite_tensors(
    folder: Path, checkpoint: Checkpoint, names: Mapping[str, object], dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        tensor = checkpoint.tensor(name)
        check_numbers(f"{folder}: tensor {name}", tensor, dtype)
        yield name, tensor


def compute_dtype(name: str, config: ModelConfig | TargetShape) -> torch.dtype:
    """The torch dtype for a `--dtype` value; `auto` is the checkpoint's own, and of a head its target's."""
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    wanted = config.checkpoint_dtype.removeprefix("torch.") if name == "auto" else name
    if wanted not in dtypes:
        whose = "the dtype of config.json" if name == "auto" else "--dtype"
        raise StartupError(f"{whose} is {wanted!r}; {', '.join(dtypes)} are supported")
    return dtypes[wanted]
