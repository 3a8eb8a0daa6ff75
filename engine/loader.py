"""From a model's folder to checked weights: the tensors that its config calls for.

No tensor is ever made up: a missing, extra or mis-shaped one is reported, never patched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.checkpoint import Checkpoint, DummyCheckpoint, check_numbers, open_checkpoint
from engine.config import ModelConfig
from engine.tensors import EMBEDDING, OUTPUT_HEAD, check_shapes
from outrider.errors import StartupError
from outrider.telemetry import get_logger

if TYPE_CHECKING:
    from engine.models.heads.target import TargetShape

# Older exports carry the rotary table, which we compute.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
PREDICTION_PREFIX = "model.mtp_layers."

log = get_logger(__name__)


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
    _warn_of_extra(folder, checkpoint.shapes(), shapes)
    _check_tied(folder, checkpoint, shapes)
    return checkpoint, _finite_tensors(folder, checkpoint, shapes, dtype)


def _warn_of_extra(folder: Path, found: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    extra = [name for name in found if name not in wanted and not name.endswith(IGNORED_SUFFIXES)]
    # A tied model's head is its embedding, and some files store it twice; prediction layers are a drafter's.
    warn_of_unused(folder, [name for name in extra if name != OUTPUT_HEAD and not name.startswith(PREDICTION_PREFIX)])


def warn_of_unused(folder: Path, names: Sequence[str]) -> None:
    """Logs which tensors of a folder are left out, if any."""
    if names:
        log.warning("tensors not used", folder=str(folder), count=len(names), first=names[:5])


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
