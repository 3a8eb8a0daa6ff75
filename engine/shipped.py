"""Draft heads that come with Outrider, small on disk (packed.py).

A shipped file is one safetensors file; its metadata holds config.json, the algorithm, which target the head was trained
for, and `bases`: the target's tensor beside which one of its own is stored, or which it is where none is stored. On
first use it is expanded, once, into the published bf16 form in the cache, which every loader reads. So a draft model
ships only what was trained; embedding, output head and tokenizer come from the target's files.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from engine.checkpoint import Checkpoint, open_checkpoint
from engine.cpu_kernels import cpu_kernels
from engine.fingerprint import numerics_id
from engine.packed import SCALE, Tensors, dequantized, difference, moved, parents, quantized
from engine.saving import save_tensors
from engine.tensors import EMBEDDING
from engine.whole import locked, put_in_place, work_folder
from outrider import env
from outrider.errors import StartupError

SHIPPED = Path(__file__).parent / "weights"
HEADS_FOLDER = "heads"
# Of a target's files, what a whole draft model needs beside its weights.
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def shipped_head(algorithm: str, target: Path, *, folder: Path = SHIPPED) -> Path | None:
    """The expanded folder of the head that is shipped for that algorithm and these weights of a target; None without.

    Raises StartupError when the file is damaged or the cache cannot be written.
    """
    for path in sorted(folder.glob("*.safetensors")):
        facts = _facts(path)
        if facts["algorithm"] == algorithm and facts["target"] == target_id(target):
            return _expanded(path, facts, target)
    return None


def shipped_algorithms(target: Path, *, folder: Path = SHIPPED) -> list[str]:
    """The algorithms that a head is shipped for, for these weights of a target."""
    every = [_facts(path) for path in sorted(folder.glob("*.safetensors"))]
    return [facts["algorithm"] for facts in every if facts["target"] == target_id(target)]


def stored_quantization(folder: Path, device: torch.device) -> str | None:
    """The method that a head's weights are rounded for, where kernels gain by it: int8 of shipped ones, on a CPU."""
    return "int8" if is_shipped(folder) and device.type == "cpu" and cpu_kernels() is not None else None


def shipped_token_map(folder: Path, target: Path) -> str | None:
    """The map of tokens (FR-Spec) that a shipped head drafts from, where there is one for the target: rarer ones it has
    hardly learnt, and so it reads a third of the output head."""
    path = SHIPPED / "token_maps" / f"{target.name}.safetensors"
    return str(path) if is_shipped(folder) and path.is_file() else None


def is_shipped(folder: Path) -> bool:
    """Whether a folder is what a shipped head was expanded into."""
    return folder.parent == env.home() / HEADS_FOLDER


def target_id(target: Path) -> str:
    """Names a target's weights: equal for equal files."""
    return numerics_id(open_checkpoint(target, load_format="auto").files)


def pack(head: Path, algorithm: str, target: Path, output: Path) -> int:
    """Writes the published head in folder `head` as a file to ship; returns its bytes."""
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(head / "model.safetensors")
    checkpoint = open_checkpoint(target, load_format="auto")
    bases = parents(tensors, checkpoint)
    metadata = {
        "algorithm": algorithm, "target": target_id(target), "config": json.dumps(config), "bases": json.dumps(bases),
    }  # fmt: skip
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_suffix(".partial")
    save_tensors(_packed(tensors, bases, checkpoint), partial, metadata)
    put_in_place(partial, output)
    return output.stat().st_size


def _packed(tensors: Tensors, bases: Mapping[str, str], target: Checkpoint) -> dict[str, torch.Tensor]:
    packed = quantized({name: tensor for name, tensor in tensors.items() if name not in bases})
    for name, base in bases.items():
        whole = target.tensor(base)
        if not torch.equal(tensors[name], whole.to(tensors[name].dtype)):
            packed[name], packed[name + SCALE] = difference(tensors[name], whole)
    return packed


def _unpacked(packed: Tensors, bases: Mapping[str, str], target: Checkpoint) -> dict[str, torch.Tensor]:
    own = {name: tensor for name, tensor in packed.items() if name.removesuffix(SCALE) not in bases}
    tensors = dequantized(own)
    for name, base in bases.items():
        whole = target.tensor(base)
        if name in packed:
            tensors[name] = moved(packed[name], packed[name + SCALE], whole)
        else:
            tensors[name] = whole.to(torch.bfloat16) if whole.ndim > 1 else whole
    return tensors


def _facts(path: Path) -> dict[str, Any]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        facts = {name: metadata[name] for name in ("algorithm", "target", "config")}
        bases = json.loads(metadata.get("bases", "{}"))
        if not isinstance(bases, dict):
            raise TypeError(f"bases is {bases!r}")
        return facts | {"bases": bases}
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise StartupError(f"the shipped head {path} is damaged: {error!r}") from error


def _expanded(path: Path, facts: dict[str, Any], target: Path) -> Path:
    """The published form in the cache, made when it is not there; a changed file is another folder."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    heads = env.home() / HEADS_FOLDER
    final = heads / f"{path.stem}-{digest}"
    if final.is_dir():
        return final
    try:
        heads.mkdir(parents=True, exist_ok=True)
        with locked(heads / ".lock", final), work_folder(heads, ".tmp-") as work:
            for left in heads.glob(".tmp-*"):  # by a process that was killed: nobody else has the lock
                if left != work:
                    shutil.rmtree(left, ignore_errors=True)
            if not final.is_dir():
                ready = work / "head"
                ready.mkdir()
                _write(path, facts, target, ready)
                put_in_place(ready, final)
    except OSError as error:
        raise StartupError(f"the shipped head cannot be expanded below {heads}: {error}") from error
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise StartupError(f"the shipped head {path} is damaged: {error!r}") from error
    return final


def _write(path: Path, facts: dict[str, Any], target: Path, folder: Path) -> None:
    tensors = _unpacked(load_file(path), facts["bases"], open_checkpoint(target, load_format="auto"))
    if EMBEDDING in tensors:  # a whole model
        for name in TEXT_FILES:
            if (target / name).is_file():
                shutil.copyfile(target / name, folder / name)
    (folder / "config.json").write_text(facts["config"], encoding="utf-8")
    save_tensors(tensors, folder / "model.safetensors")
