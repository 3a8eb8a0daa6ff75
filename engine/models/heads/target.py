"""What a head takes from the target without loading it: its shape, its embedding and its output head.

Reads the few numbers that it needs from any decoder's config.json, so the target's family need not be one of ours;
where other keys or names than most families' are used, transformers says which.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint import Checkpoint, DummyCheckpoint, open_checkpoint
from engine.config import ARCHITECTURES
from engine.fields import Fields
from engine.models.heads.target_names import names_by_transformers, sizes_by_transformers
from engine.tensors import EMBEDDING, OUTPUT_HEAD
from outrider.errors import StartupError
from outrider.text_files import read_json

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")


@dataclass(frozen=True, slots=True)
class TargetShape:
    """Where the target is, and its sizes."""

    folder: Path
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    tied_embeddings: bool | None  # None: not said
    checkpoint_dtype: str

    @classmethod
    def from_folder(cls, folder: Path) -> TargetShape:
        """Reads config.json. StartupError for a number that is missing or absurd."""
        raw = read_json(folder / "config.json")
        names = raw.get("architectures")
        architecture = str(names[0]) if isinstance(names, list) and names else ""
        if isinstance(inner := raw.get("text_config"), dict):  # of a model for more than text
            raw = inner | {key: value for key, value in raw.items() if key not in inner}
        if architecture not in ARCHITECTURES and any(raw.get(key) is None for key in _SIZES):
            return cls._by_transformers(folder)
        fields = Fields(folder / "config.json", raw)
        return cls(
            folder=folder,
            architecture=architecture,
            vocab_size=fields.count("vocab_size"),
            hidden_size=fields.count("hidden_size"),
            num_layers=fields.count("num_hidden_layers"),
            tied_embeddings=tied if isinstance(tied := raw.get("tie_word_embeddings"), bool) else None,
            checkpoint_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        )

    @classmethod
    def _by_transformers(cls, folder: Path) -> TargetShape:
        config = sizes_by_transformers(folder)
        return cls(
            folder=folder,
            architecture=config.architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            tied_embeddings=config.tied_embeddings,
            checkpoint_dtype=config.checkpoint_dtype,
        )


def shared_tensor(target: TargetShape, name: str, *, load_format: str) -> torch.Tensor:
    """The target's EMBEDDING or OUTPUT_HEAD, [vocab, hidden], as stored; a tied model's head is its embedding.

    Nothing else is read from its files.
    """
    shape = (target.vocab_size, target.hidden_size)
    if load_format == "dummy":
        checkpoint: Checkpoint = DummyCheckpoint({EMBEDDING: shape, OUTPUT_HEAD: shape})
    else:
        checkpoint = open_checkpoint(target.folder, load_format=load_format)
    stored = _stored_name(target, checkpoint, name)
    found = checkpoint.shapes()[stored]
    if found != shape:
        raise StartupError(f"{target.folder}: {stored} is {list(found)}; its config.json calls for {list(shape)}")
    return checkpoint.tensor(stored)


def _stored_name(target: TargetShape, checkpoint: Checkpoint, name: str) -> str:
    """The tensor's name in the files: below a language model's prefix in those that hold several models."""
    if name == OUTPUT_HEAD and target.tied_embeddings:
        name = EMBEDDING
    found = _named(checkpoint, name)
    if not found and name == OUTPUT_HEAD and target.tied_embeddings is None:  # as its family takes for granted
        found = _named(checkpoint, EMBEDDING)
        name = EMBEDDING if found else name
    if not found and target.architecture not in ARCHITECTURES:
        name = names_by_transformers(target.folder)[name]
        found = _named(checkpoint, name)
    exact = [stored for stored in found if stored == name]
    if len(exact or found) != 1:
        raise StartupError(
            f"the head shares {name} with its target, of which {target.folder} has {len(found)}; one is needed"
        )
    return (exact or found)[0]


def _named(checkpoint: Checkpoint, name: str) -> list[str]:
    return [
        stored
        for stored in checkpoint.shapes()
        if (stored == name or stored.endswith(f".{name.removeprefix('model.')}")) and ".layers." not in stored
    ]
