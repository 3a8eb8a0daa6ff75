"""A name for what must be equal on two sides: the arithmetic of a target."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.execution import Execution
from engine.quantization import kernels_used
from kernels.dispatch import triton_version
from outrider.text_files import read_json

SAMPLE_BYTES = 1 << 20
SAMPLES_PER_FILE = 16
_MERE_NAMES = {"_name_or_path", "transformers_version"}


def config_facts(folder: Path) -> str:
    """What config.json says, for numerics_id: tokens follow from rotary scaling and such as much as from weights."""
    said = read_json(folder / "config.json")
    return json.dumps({key: value for key, value in said.items() if key not in _MERE_NAMES}, sort_keys=True)


def torch_facts(execution: Execution, quantization: str | None, device: torch.device, kept: torch.dtype) -> list[str]:
    """What decides about last bits wherever torch and Triton compute, for numerics_id; kept: the pool's dtype."""
    facts = [f"torch {torch.__version__} {device.type} {_processor(device)}", kernels_used(quantization, device)]
    return [*facts, triton_version(device), str(execution.attention.resolved(device)), str(kept)]


def _processor(device: torch.device) -> str:
    """The GPU and what it can do, or the CPU's instructions."""
    if device.type != "cuda":
        return torch.backends.cpu.get_cpu_capability()
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} {major}.{minor}"


def numerics_id(weight_files: Sequence[Path], *facts: str) -> str:
    """Sixteen hex digits: equal ids compute equal tokens. `facts` say config, dtype, quantisation, backend, versions.

    Of each weight file its size, its head and evenly spaced blocks are hashed: reading all of a large model would
    take longer than loading it.
    """
    digest = hashlib.sha256("\0".join(facts).encode())
    for path in sorted(weight_files, key=lambda item: item.name):
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES_PER_FILE):
                file.seek(sample * max(size - SAMPLE_BYTES, 0) // (SAMPLES_PER_FILE - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
