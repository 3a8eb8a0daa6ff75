"""A trained head in the form that SGLang, vLLM and EAGLE's own code read: config.json and model.safetensors in bf16.

EAGLE and EAGLE-3 by their own names (`midlayer` for EAGLE-3's layer, d2t and t2d with it), NextN as DeepSeek exports
it on its own (`model.layers.0`), STANDALONE as a whole model of the target's architecture, with its embedding and head.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from engine.model_folder import resolve_model
from engine.models.heads.names import published_name
from engine.models.heads.target import TargetShape, shared_tensor
from engine.saving import save_tensors
from engine.shipped import TEXT_FILES
from engine.tensors import EMBEDDING
from engine.tensors import OUTPUT_HEAD as TARGET_HEAD
from engine.whole import flushed, put_in_place
from outrider.errors import StartupError, Unfinished, reason_of
from outrider.telemetry import announce
from training.args import ExportArgs
from training.card import Figures, card, figures_fault
from training.checkpoints import BEST, LAST, Checkpoint
from training.kinds import EAGLE3, NEXTN, STANDALONE, Kind, make_kind
from training.target_states import target_id

# All that an export writes, so all that may be replaced by one.
_FILES = {"config.json", "model.safetensors", "README.md", *TEXT_FILES}
_NEXTN_NAMES = {"norm.weight": "shared_head.norm.weight"}


def main(args: ExportArgs) -> int:
    """Exports a checkpoint."""
    folder, output = Path(args.checkpoint), Path(args.output)
    check_replaceable(output)
    checkpoint = Checkpoint.load(folder / (BEST if args.best else LAST))
    target = resolve_model(args.model_path, revision=args.revision)
    kind = kind_of(checkpoint, target, args.load_format)
    figures = None if args.figures is None else _figures(Path(args.figures))
    export(kind, checkpoint, output, target=target, load_format=args.load_format, figures=figures)
    announce(f"{output}: {kind.algorithm} after {checkpoint.seen:,} tokens")
    return 0


def kind_of(checkpoint: Checkpoint, target: Path, load_format: str = "auto") -> Kind:
    """The kind of a checkpoint's network. StartupError when it was made for another target."""
    facts = checkpoint.facts
    kind = make_kind(
        facts["algorithm"], target, draft_vocab_size=facts["draft_vocab_size"], num_kv_heads=facts["num_kv_heads"],
        num_layers=facts["num_layers"], fc_norm=not facts.get("no_fc_norm", False),
    )  # fmt: skip
    wanted = kind.shapes(len(checkpoint.drafted))
    found = {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}
    if found != wanted:
        raise StartupError(f"the checkpoint was made for another target than {target}: its tensors have other shapes")
    trained, given = facts.get("target"), target_id(target, load_format)
    if trained not in (None, given):
        raise StartupError(f"the checkpoint was made for another target than {target}: {trained}, not {given}")
    return kind


def export(
    kind: Kind, checkpoint: Checkpoint, folder: Path, *, target: Path, load_format: str = "auto",
    figures: Figures | None = None,
) -> None:  # fmt: skip
    """Writes the head and its card to `folder`, which is replaced as a whole if it is an export's."""
    folder = folder.resolve()
    check_replaceable(folder, target)
    drafted = checkpoint.drafted
    stored = published(kind, checkpoint.measured, drafted, target=target, load_format=load_format)
    partial = folder.with_name(folder.name + ".partial")
    check_replaceable(partial)
    try:
        with _removed_unless_whole(partial):
            partial.mkdir(parents=True)
            values = kind.values | ({"draft_vocab_size": len(drafted)} if kind.algorithm == EAGLE3 else {})
            (partial / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
            save_tensors(stored, partial / "model.safetensors")
            (partial / "README.md").write_text(card(checkpoint, target.name, figures), encoding="utf-8")
            for name in TEXT_FILES if kind.algorithm == STANDALONE else ():
                if (target / name).is_file():
                    shutil.copyfile(target / name, partial / name)
            flushed(partial)  # which takes long, while the one before is there
            check_replaceable(folder, target)
        _remove(folder)
        put_in_place(partial, folder)
    except OSError as error:
        raise Unfinished(f"the head cannot be written to {folder}: {reason_of(error)}") from error


def check_replaceable(folder: Path, target: Path | None = None) -> None:
    """StartupError unless an export may take the folder's place: it is not there, or holds an export and no more."""
    try:
        if target is not None and folder.exists() and folder.samefile(target):
            raise StartupError(f"{folder} is the target's own folder; name another for the head")
        if folder.exists() and not folder.is_dir():
            raise StartupError(f"{folder} is a file; the head needs a folder")
        for entry in sorted(folder.iterdir()) if folder.exists() else ():
            if entry.name not in _FILES or entry.is_symlink() or not entry.is_file():
                raise StartupError(f"{folder} holds {entry.name}, which is no export's; name another folder")
    except OSError as error:
        raise StartupError(f"the head cannot be written to {folder}: {reason_of(error)}") from error


@contextlib.contextmanager
def _removed_unless_whole(partial: Path) -> Iterator[None]:
    """Removes an export that was begun before, and the one that is written within where that fails."""
    _remove(partial)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            _remove(partial)
        raise


def _remove(folder: Path) -> None:
    """An export; OSError where something else came to lie there meanwhile."""
    if folder.is_dir():
        for name in _FILES:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _figures(path: Path) -> Figures:
    what = f"{path} is no file of figures that `train eval --output` wrote"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"{what}: {reason_of(error)}") from error
    if (fault := figures_fault(found)) is not None:
        raise StartupError(f"{what}: {fault}")
    return found


def published(
    kind: Kind, tensors: Mapping[str, torch.Tensor], drafted: torch.Tensor, *, target: Path, load_format: str = "auto"
) -> dict[str, torch.Tensor]:
    """The tensors as they are published, by their published names; weights bf16. drafted: int64 [n], ids."""
    own = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in tensors.items()}
    if kind.algorithm == STANDALONE:
        return _whole_model(own, target, load_format)
    if kind.algorithm == NEXTN:
        inner = {name.removeprefix("0."): tensor for name, tensor in own.items()}
        return {f"model.layers.0.{_NEXTN_NAMES.get(name, name)}": tensor for name, tensor in inner.items()}
    stored = {published_name(kind.config.family, name): tensor for name, tensor in own.items()}
    if kind.algorithm == EAGLE3:
        drafted = drafted.cpu()
        vocab_size = kind.config.block.vocab_size
        stored["d2t"] = drafted - torch.arange(len(drafted))
        stored["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, drafted, True)
    return {name: tensor.contiguous() for name, tensor in stored.items()}


def _whole_model(own: dict[str, torch.Tensor], target: Path, load_format: str) -> dict[str, torch.Tensor]:
    shape = TargetShape.from_folder(target)
    shared = {EMBEDDING: shared_tensor(shape, EMBEDDING, load_format=load_format)}
    if not shape.tied_embeddings:
        shared[TARGET_HEAD] = shared_tensor(shape, TARGET_HEAD, load_format=load_format)
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in (own | shared).items()}
