"""A published head: what it is, and as the place where training starts: what it has learnt is kept, optimizers begin
anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

from engine.checkpoint import open_checkpoint
from engine.config import ARCHITECTURES
from engine.models.heads.load import HeadFolder
from engine.models.heads.names import DRAFT_TO_TARGET, EMBEDDING, OUTPUT_HEAD, TARGET_TO_DRAFT
from engine.models.heads.token_map import target_tokens
from engine.shipped import shipped_head
from engine.tensors import EMBEDDING as TARGET_EMBEDDING
from engine.tensors import OUTPUT_HEAD as TARGET_HEAD
from outrider.errors import StartupError
from outrider.text_files import read_json
from training.kinds import EAGLE, EAGLE3, NEXTN, STANDALONE, Kind

_ALGORITHMS: Final = {"eagle": EAGLE, "eagle3": EAGLE3, "nextn": NEXTN, "mimo": NEXTN}
# Instead of a folder: the one that comes with Outrider.
SHIPPED: Final = "shipped"

# What a head computes with beside its tensors; where its config.json leaves one out, it is the usual one.
_SETTINGS: Final = ("family", "aux_layers", "norm_before_residual", "norm_output")
_BLOCK_SETTINGS: Final = ("rope_theta", "rope_scaling", "rms_eps")
_MAPS: Final = (DRAFT_TO_TARGET, TARGET_TO_DRAFT)
# Of a whole draft model what is the target's; heads may bring it too.
_WHOLE_MODELS: Final = (TARGET_EMBEDDING, TARGET_HEAD)


def algorithm_of(folder: Path) -> str:
    """The algorithm by which a network is served; its tensors tell. StartupError for a head of several stages."""
    if is_whole_model(folder):
        return STANDALONE
    family = HeadFolder.open(folder).config.family
    if family not in _ALGORITHMS:
        raise StartupError(
            f"{folder} is a {family} head, whose stages take turns; it is neither measured nor packed here"
        )
    return _ALGORITHMS[family]


def is_whole_model(folder: Path) -> bool:
    """Whether it is no head but a draft model, by its config.json."""
    names: Any = read_json(folder / "config.json").get("architectures")
    return isinstance(names, list) and names[:1] != [] and names[0] in ARCHITECTURES


def initial_folder(name: str, algorithm: str, target: Path) -> Path:
    """The folder that `--initial-head` names. StartupError where none is shipped for that target."""
    if name != SHIPPED:
        return Path(name)
    folder = shipped_head(algorithm, target)
    if folder is None:
        raise StartupError(f"--initial-head {SHIPPED}: no {algorithm} head comes with Outrider for {target}")
    return folder


def exported_tensors(kind: Kind, folder: Path, drafted: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Every trained tensor of an exported head, fp32 by the engine's names, and the tokens that it drafts.

    drafted: int64 [n]: what those would be; an output head brings its own. StartupError for a head of another shape, or
    with other settings.
    """
    if kind.algorithm == STANDALONE:
        checkpoint = open_checkpoint(folder, load_format="auto")
        found = {name: shape for name, shape in checkpoint.shapes().items() if name not in _WHOLE_MODELS}
        read = checkpoint.tensor
    else:
        opened = HeadFolder.open(folder)
        _check_settings(opened, kind)
        if kind.has_output_head and DRAFT_TO_TARGET in opened.names.stored:
            drafted = _own_tokens(opened, kind)
        shapes = opened.checkpoint.shapes()
        found = {own: shapes[name] for own, name in opened.names.stored.items() if own not in _MAPS}
        read = opened.tensor
    wanted = kind.shapes(len(drafted))
    if spare := found.keys() - wanted.keys() - {EMBEDDING, OUTPUT_HEAD}:
        raise StartupError(f"--initial-head {folder}: {min(spare)} has no place in {kind.algorithm} with these flags")
    for name, shape in wanted.items():
        if found.get(name) != shape:
            raise StartupError(
                f"--initial-head {folder}: {name} is {list(found.get(name, ()))}, {kind.algorithm} with these flags "
                f"has {list(shape)}"
            )
    return {name: read(name).float() for name in wanted}, drafted


def _check_settings(opened: HeadFolder, kind: Kind) -> None:
    for names, its, ours in (
        (_SETTINGS, opened.config, kind.config), (_BLOCK_SETTINGS, opened.config.block, kind.config.block),
    ):  # fmt: skip
        for name in names:
            found, wanted = getattr(its, name, None), getattr(ours, name, None)
            if found not in (None, wanted):
                raise StartupError(
                    f"--initial-head {opened.folder}: {name} is {found}, {kind.algorithm} for this target has {wanted}"
                )


def _own_tokens(opened: HeadFolder, kind: Kind) -> torch.Tensor:
    tokens = target_tokens(
        opened.mapping(DRAFT_TO_TARGET), None, kind.config.block.vocab_size, str(opened.folder)
    )  # fmt: skip
    wanted = kind.values["draft_vocab_size"]
    if len(tokens) != wanted:
        raise StartupError(
            f"--initial-head {opened.folder} drafts {len(tokens)} tokens; --draft-vocab-size is {wanted}"
        )
    return tokens
