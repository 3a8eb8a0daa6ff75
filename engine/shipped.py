"""Draft heads that come with Outrider, and the form in which they do: int8 with a scale for each row.

A shipped file is one safetensors file: each matrix as int8 [rows, columns] with `NAME.scale` fp32 [rows], everything
else as it is; its metadata holds config.json, the algorithm, and which target the head was trained for. On first use it
is expanded, once, into the published bf16 form in the cache, which every loader reads. A draft model ships only its
trained layers; embedding, output head and tokenizer come from the target's files.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.checkpoint import open_checkpoint
from engine.fingerprint import numerics_id
from engine.models.heads.target import EMBEDDING, OUTPUT_HEAD, TargetShape, shared_tensor
from outrider import env
from outrider.errors import StartupError

SHIPPED = Path(__file__).parent / "weights"
SCALE = ".scale"
SHARED = (EMBEDDING, OUTPUT_HEAD)
# What a whole draft model has and a head has not.
FINAL_NORM = "model.norm.weight"
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")

Tensors = Mapping[str, torch.Tensor]


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


def target_id(target: Path) -> str:
    """Names a target's weights: equal for equal files."""
    return numerics_id(open_checkpoint(target, load_format="auto").files)


def pack(head: Path, algorithm: str, target: Path, output: Path) -> int:
    """Writes the published head in folder `head` as a file to ship; returns its bytes."""
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    with safe_open(head / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if FINAL_NORM in tensors:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in SHARED}
    metadata = {"algorithm": algorithm, "target": target_id(target), "config": json.dumps(config)}
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_suffix(".partial")
    save_file(quantized(tensors), partial, metadata=metadata)
    os.replace(partial, output)
    return output.stat().st_size


def quantized(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Matrices as int8 with a scale for each row; vectors, maps and masks as they are."""
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or not tensor.is_floating_point():
            packed[name] = tensor.contiguous()
            continue
        wide = tensor.float()
        # A row of zeros keeps a scale of 1.
        largest = wide.abs().amax(dim=1)
        scale = torch.where(largest > 0, largest / 127, 1.0)
        packed[name] = (wide / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        packed[name + SCALE] = scale
    return packed


def dequantized(packed: Tensors) -> dict[str, torch.Tensor]:
    """What `quantized` made, in bf16 again."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in packed.items():
        if name.endswith(SCALE) and name.removesuffix(SCALE) in packed:
            continue
        scale = packed.get(name + SCALE)
        tensors[name] = tensor if scale is None else (tensor.float() * scale[:, None]).to(torch.bfloat16)
    return tensors


def _facts(path: Path) -> dict[str, Any]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        return {"algorithm": metadata["algorithm"], "target": metadata["target"], "config": metadata["config"]}
    except (SafetensorError, OSError, KeyError) as error:
        raise StartupError(f"the shipped head {path} is damaged: {error!r}") from error


def _expanded(path: Path, facts: dict[str, Any], target: Path) -> Path:
    """The published form in the cache, made when it is not there; a changed file is another folder."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    heads = env.home() / "heads"
    final = heads / f"{path.stem}-{digest}"
    if final.is_dir():
        return final
    try:
        heads.mkdir(parents=True, exist_ok=True)
        with _locked(heads / ".lock"), tempfile.TemporaryDirectory(prefix=".tmp-", dir=heads) as work:
            if not final.is_dir():
                ready = Path(work) / "head"
                ready.mkdir()
                _write(path, facts, target, ready)
                ready.rename(final)
    except OSError as error:
        raise StartupError(f"the shipped head cannot be expanded below {heads}: {error}") from error
    return final


def _write(path: Path, facts: dict[str, Any], target: Path, folder: Path) -> None:
    with safe_open(path, framework="pt") as file:
        tensors = dequantized({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    if FINAL_NORM in tensors:
        shape = TargetShape.from_folder(target)
        names = (EMBEDDING,) if shape.tied_embeddings else SHARED
        tensors |= {name: shared_tensor(shape, name, load_format="auto").to(torch.bfloat16) for name in names}
        for name in TEXT_FILES:
            if (target / name).is_file():
                shutil.copyfile(target / name, folder / name)
    (folder / "config.json").write_text(facts["config"], encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock; the kernel lets go of a dead process's."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
