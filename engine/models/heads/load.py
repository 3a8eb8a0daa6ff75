"""From a head's folder and its target's to a network that is ready to run; whatever does not fit is refused.

Only the embedding and the output head of the target are read, and only where the head has none of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from engine.checkpoint import Checkpoint, DummyCheckpoint, check_numbers, open_checkpoint
from engine.feature_spec import FeatureSpec
from engine.loader import compute_dtype
from engine.models.heads.base import Head, HeadConfig, MakeLinear, Shapes, Vocabulary
from engine.models.heads.config import RawConfig
from engine.models.heads.eagle import EagleConfig
from engine.models.heads.eagle3 import Eagle3Config
from engine.models.heads.mtp import MtpConfig
from engine.models.heads.names import (
    DRAFT_TO_TARGET,
    EMBEDDING,
    OUTPUT_HEAD,
    TARGET_TO_DRAFT,
    HeadNames,
    NoHeadError,
    family_named,
    head_names,
)
from engine.models.heads.target import TargetShape, shared_tensor
from engine.models.heads.token_map import load_token_map, target_tokens
from engine.tensors import EMBEDDING as TARGET_EMBEDDING
from engine.tensors import OUTPUT_HEAD as TARGET_HEAD
from engine.tensors import check_shapes, refuse_tensors
from kernels.linear import Linear
from outrider.errors import StartupError
from outrider.telemetry import get_logger
from outrider.text_files import read_json

_MAPS = (DRAFT_TO_TARGET, TARGET_TO_DRAFT)

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HeadFolder:
    """A head's checkpoint, opened and checked, none of its weights read yet."""

    folder: Path
    config: HeadConfig
    names: HeadNames
    checkpoint: Checkpoint

    @classmethod
    def open(cls, folder: Path, *, load_format: str = "auto") -> HeadFolder:
        """Reads config.json and the tensors' names and shapes. StartupError for what is missing, or not a head's.

        `folder` may be a target's own, whose multi-token-prediction layers are then meant. load_format: auto,
        safetensors, pt (pickled files, read with weights_only) or dummy (random weights, seeded).
        """
        raw = RawConfig(folder / "config.json", flattened(read_json(folder / "config.json")))
        if load_format == "dummy":
            return cls._dummy(folder, raw)
        checkpoint = open_checkpoint(folder, load_format=load_format)
        found = checkpoint.shapes()
        names = head_names(found, folder, family=family_named(raw.values))
        stored = {own: found[name] for own, name in names.stored.items()}
        config = _config(raw, names, stored)
        _check_tensors(folder, found, names, config)
        return cls(folder, config, names, checkpoint)

    @classmethod
    def _dummy(cls, folder: Path, raw: RawConfig) -> HeadFolder:
        """Random weights; what family they are of, config.json says."""
        family = family_named(raw.values)
        if family is None:
            found = raw.values.get("architectures")
            raise NoHeadError(f"{raw.path}: `architectures` names no draft head: {found}")
        stages = raw.count("num_nextn_predict_layers", 1) if family == "multi-layer" else 1
        config = _config(raw, HeadNames(family, stages, {}), {})
        shapes = config.shapes()
        if isinstance(config, Eagle3Config):
            drafted = config.draft_vocab_size or config.block.vocab_size
            shapes |= {OUTPUT_HEAD: (drafted, config.block.hidden_size), DRAFT_TO_TARGET: (drafted,)}
        return cls(folder, config, HeadNames(family, stages, {name: name for name in shapes}), DummyCheckpoint(shapes))

    def tensor(self, name: str) -> torch.Tensor:
        """A floating-point tensor by our name for it. StartupError when it is not finite."""
        tensor = self.checkpoint.tensor(self.names.stored[name])
        if tensor.numel() == 0:
            raise StartupError(f"{self.folder}: tensor {self.names.stored[name]} is {list(tensor.shape)}; it is empty")
        check_numbers(f"{self.folder}: tensor {self.names.stored[name]}", tensor)
        return tensor

    def mapping(self, name: str) -> torch.Tensor:
        """d2t [drafted] or t2d [vocabulary], which are no floating-point tensors."""
        stored = self.names.stored[name]
        if isinstance(self.checkpoint, DummyCheckpoint):
            return torch.zeros(self.checkpoint.shapes()[stored], dtype=torch.int64)
        for path in self.checkpoint.files:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt") as file:
                    if stored in file.keys():  # noqa: SIM118  its object is no mapping
                        return file.get_tensor(stored)
            else:
                loaded = torch.load(path, map_location="cpu", weights_only=True)
                if stored in loaded:
                    return loaded[stored]
        raise StartupError(f"{self.folder}: tensor {stored} cannot be read")


def load_head(
    folder: Path, target_folder: Path, *, max_len: int, dtype: str = "auto", device: torch.device | str = "cpu",
    load_format: str = "auto", target_load_format: str = "auto", token_map: str | None = None,
    make_linear: MakeLinear = Linear,
) -> tuple[Head, FeatureSpec]:  # fmt: skip
    """A head for positions below `max_len` (or its sliding window), and the target's states that it goes on from.

    token_map: FR-Spec's file; EAGLE-3, which has a map of its own, ignores it. Raises StartupError, naming both sides,
    for a head that does not fit the target.
    """
    opened = HeadFolder.open(folder, load_format=load_format)
    target = TargetShape.from_folder(target_folder)
    features = opened.config.features(target)
    place, kind = torch.device(device), compute_dtype(dtype, target)

    def ready(name: str, tensor: torch.Tensor) -> torch.Tensor:
        # A vocabulary's may be the target's.
        whose = (
            f"{folder}: tensor {opened.names.stored[name]}" if name in opened.names.stored else f"the target's {name}"
        )
        check_numbers(whose, tensor, kind)
        return tensor.to(device=place, dtype=kind)

    vocabulary = _vocabulary(opened, target, target_load_format, token_map)
    vocabulary = Vocabulary(
        embedding=ready(EMBEDDING, vocabulary.embedding),
        head=ready(OUTPUT_HEAD, vocabulary.head),
        tokens=None if vocabulary.tokens is None else vocabulary.tokens.to(place),
    )
    tensors = {name: ready(name, opened.tensor(name)) for name in opened.config.shapes()}
    max_len = min(max_len, opened.config.block.max_position)
    return opened.config.build(tensors, vocabulary, max_len, make_linear), features


def flattened(raw: dict[str, object]) -> dict[str, object]:
    """A config.json with speculators' nested layer config, where it has one, brought to the top."""
    nested = raw.get("transformer_layer_config")
    if not isinstance(nested, dict):
        return raw
    outer = {key: value for key, value in raw.items() if key not in {"transformer_layer_config", "architectures"}}
    if "fusion_bias" in outer:
        outer["bias"] = outer.pop("fusion_bias")
    return {**outer, **nested}


def _config(raw: RawConfig, names: HeadNames, stored: Shapes) -> HeadConfig:
    if names.family == "eagle":
        return EagleConfig.read(raw, stored)
    if names.family == "eagle3":
        return Eagle3Config.read(raw, stored)
    return MtpConfig.read(raw, names.family, names.num_stages, stored)


def _check_tensors(folder: Path, found: Mapping[str, tuple[int, ...]], names: HeadNames, config: HeadConfig) -> None:
    """Every tensor that the config calls for, in its shape, and none besides: an unknown one would change the sums."""
    wanted = {names.in_file(name): shape for name, shape in config.shapes().items()}
    check_shapes(folder, found, wanted, f"of the {config.family} head ")
    known = config.shapes().keys() | ({EMBEDDING, OUTPUT_HEAD, *_MAPS} if config.family == "eagle3" else {EMBEDDING})
    strange = [stored for name, stored in names.stored.items() if name not in known]
    refuse_tensors(folder, strange, f"are not known in a {config.family} head")


def _vocabulary(opened: HeadFolder, target: TargetShape, target_load_format: str, token_map: str | None) -> Vocabulary:
    """Embedding and output head, the head's own or the target's, as stored."""
    own, block = opened.names.stored, opened.config.block

    def shared(name: str) -> torch.Tensor:
        if block.hidden_size != target.hidden_size:
            raise StartupError(
                f"{opened.folder} has no {name} of its own and has hidden_size {block.hidden_size}; that of "
                f"{target.folder}, {target.hidden_size}, does not fit"
            )
        return shared_tensor(target, name, load_format=target_load_format)

    embedding = opened.tensor(EMBEDDING) if EMBEDDING in own else shared(TARGET_EMBEDDING)
    _check_width(opened, EMBEDDING, embedding, target.vocab_size)
    if isinstance(opened.config, Eagle3Config):
        if token_map is not None:
            log.warning("token map ignored: an EAGLE-3 head has its own", token_map=token_map)
        tokens = own_tokens(opened, opened.config)
        if OUTPUT_HEAD in own:
            head = opened.tensor(OUTPUT_HEAD)
        else:
            head = embedding if block.tied_embeddings else shared(TARGET_HEAD)
    else:
        head, tokens = shared(TARGET_HEAD), None
        if token_map is not None:
            tokens = load_token_map(token_map, target.vocab_size)
            head = head[tokens]
    _check_width(opened, OUTPUT_HEAD, head, target.vocab_size if tokens is None else len(tokens))
    return Vocabulary(embedding, head, tokens)


def own_tokens(opened: HeadFolder, config: Eagle3Config) -> torch.Tensor | None:
    """The target's ids, int64 [drafted], of an EAGLE-3 head's output rows; None where they are the same."""
    own, vocab_size = opened.names.stored, config.block.vocab_size
    drafted = config.draft_vocab_size or vocab_size
    if DRAFT_TO_TARGET not in own:
        if drafted != vocab_size:
            raise StartupError(
                f"{opened.folder}: tensor d2t is missing; draft_vocab_size is {drafted}, of {vocab_size} tokens"
            )
        return None
    t2d = opened.mapping(TARGET_TO_DRAFT) if TARGET_TO_DRAFT in own else None
    tokens = target_tokens(opened.mapping(DRAFT_TO_TARGET), t2d, vocab_size, str(opened.folder))
    if len(tokens) != drafted:
        raise StartupError(f"{opened.folder}: draft_vocab_size is {drafted}, but d2t names {len(tokens)} tokens")
    return tokens


def _check_width(opened: HeadFolder, name: str, tensor: torch.Tensor, rows: int) -> None:
    wanted = (rows, opened.config.block.hidden_size)
    if tuple(tensor.shape) != wanted:
        stored = opened.names.in_file(name)
        raise StartupError(f"{opened.folder}: {stored} is {list(tensor.shape)}; {list(wanted)} is needed")


def tensors_of(opened: HeadFolder) -> Mapping[str, torch.Tensor]:
    """Every tensor of an opened head by our names, as stored, maps included."""
    return {name: opened.mapping(name) if name in _MAPS else opened.tensor(name) for name in opened.names.stored}
