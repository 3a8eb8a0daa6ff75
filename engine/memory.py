"""How much memory there is, and how much a model's weights take of it.

On a CPU that is what the machine can still give, or the control group that this process is in, whichever is less: it
is killed at that one's limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from engine.tensors import EMBEDDING, OUTPUT_HEAD
from kernels.quantize import GROUP
from outrider.cgroups import groups, text_of

GIB = 2**30
# Of a quantised number; int4 has a step and a low of 16 bits for each group.
_QUANTISED_BYTES = {"int8": 1.0, "int8_dynamic": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / GROUP}
# Groups' files: limit, use, and in their statistics what of the use can be given back at once.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


class Memory(NamedTuple):
    """Memory in bytes."""

    free: int
    total: int


def device_memory(device: torch.device) -> Memory:
    """The memory of a GPU, or of the machine."""
    if device.type == "cuda":
        return Memory(*torch.cuda.mem_get_info(device))
    return host_memory()


def host_memory(root: Path = Path("/")) -> Memory:
    """What this process can still get without swapping, and its limit; `root` is where /proc and /sys are."""
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if rest}
    free, total = sizes["MemAvailable"], sizes["MemTotal"]
    for group in groups("memory", root):
        for limit_name, used_name, reclaimable in _FILES:
            limit, used = _number(group / limit_name), _number(group / used_name)
            if limit is not None and used is not None and limit < total:
                total = limit
                free = min(free, limit - used + _statistic(group / "memory.stat", reclaimable))
    return Memory(max(free, 0), total)


def weight_bytes(shapes: Mapping[str, tuple[int, ...]], itemsize: int, quantization: str | None) -> int:
    """Bytes that such tensors take once loaded. A tied model's head counts by itself: it is laid out apart."""
    total = 0.0
    for name, shape in shapes.items():
        count = 1
        for dim in shape:
            count *= dim
        is_matrix = len(shape) > 1 and name != EMBEDDING
        method = "int8" if name == OUTPUT_HEAD and quantization else quantization
        total += count * (_QUANTISED_BYTES[method] if is_matrix and method else itemsize)
    if OUTPUT_HEAD not in shapes and EMBEDDING in shapes:
        rows, width = shapes[EMBEDDING]
        total += rows * width * (1 if quantization else itemsize)
    return int(total)


def _number(path: Path) -> int | None:
    text = text_of(path).strip()
    return int(text) if text.isdigit() else None


def _statistic(path: Path, name: str) -> int:
    lines = text_of(path).splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
