"""The tensors of a model folder, mapped from its files; every header is checked before a byte is used.

Knows files, not models: which there are says engine/weight_files.py, which tensors there must be engine/loader.py.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.tensors import EMBEDDING, OUTPUT_HEAD
from engine.weight_files import weight_files
from outrider.errors import StartupError, reason_of

_MAX_DIMS = 16
# A header is some 100 bytes a tensor; the format's own readers stop at the same size.
MAX_HEADER_BYTES = 100 * 10**6
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


class Checkpoint(ABC):
    """Named tensors, read one by one."""

    files: tuple[Path, ...] = ()

    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape."""

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, as stored. Raises StartupError when it is no floating-point tensor."""

    @abstractmethod
    def check_dtype(self, name: str) -> None:
        """StartupError unless a tensor is of those that `tensor` gives."""


class SafetensorsCheckpoint(Checkpoint):
    """One or more safetensors files, mapped into memory."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.files = tuple(files)
        self._headers: dict[str, dict[str, Any]] = {}
        self._file_of: dict[str, Any] = {}
        with ExitStack() as stack:
            for path in self.files:
                header = read_header(path)
                try:
                    opened = stack.enter_context(safe_open(path, framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise StartupError(f"{path} is no valid safetensors file: {error}") from error
                self._headers.update(header)
                self._file_of.update(dict.fromkeys(header, opened))
            self._open = stack.pop_all()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(entry["shape"]) for name, entry in self._headers.items()}

    def tensor(self, name: str) -> torch.Tensor:
        self.check_dtype(name)
        return self._file_of[name].get_tensor(name)

    def check_dtype(self, name: str) -> None:
        dtype = self._headers[name]["dtype"]
        if dtype not in DTYPES:
            raise _unreadable(self.files, name, dtype)


class PickledCheckpoint(Checkpoint):
    """Named tensors by torch.save, read into memory with weights_only: no code of theirs is run."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.files = tuple(files)
        self._tensors: dict[str, torch.Tensor] = {}
        for path in self.files:
            tensors = _unpickled(path)
            twice = sorted(tensors.keys() & self._tensors.keys())
            if twice:
                raise StartupError(f"{path}: tensor {twice[0]} is in another file of its folder too")
            self._tensors.update(tensors)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def tensor(self, name: str) -> torch.Tensor:
        self.check_dtype(name)
        return self._tensors[name]

    def check_dtype(self, name: str) -> None:
        dtype = self._tensors[name].dtype
        if dtype not in DTYPES.values():
            raise _unreadable(self.files, name, dtype)


class DummyCheckpoint(Checkpoint):
    """Random weights, the same in every process: each tensor's seed is its name's checksum.

    Scaled so that activations stay near 1 and logits spread as a trained model's do (standard deviation about 2).
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def tensor(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            return 1.0 + 0.1 * noise
        if len(shape) == 1:
            return 0.1 * noise
        gain = 2.0 if name in {OUTPUT_HEAD, EMBEDDING} else 1.0
        return noise * gain * shape[1] ** -0.5

    def check_dtype(self, name: str) -> None:
        """All are of fp32."""


def check_numbers(what: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """StartupError, which `what` begins, where a tensor, not an empty one, is not finite or would not be in `dtype`."""
    # NaN passes through both; fifty times as fast as isfinite.
    bounds = torch.stack(torch.aminmax(tensor))
    if not bounds.isfinite().all():
        raise StartupError(f"{what} holds NaN or infinity")
    if dtype is not None and not bounds.to(dtype).isfinite().all():
        raise StartupError(f"{what} holds {bounds.abs().max():.4g}, which is infinity in {dtype}; take another --dtype")


def open_checkpoint(folder: Path, *, load_format: str) -> Checkpoint:
    """The weights of `folder`: safetensors (`auto`, `safetensors`), or pickled ones where `pt` allows them.

    Raises StartupError naming the file that is absent, damaged or not allowed.
    """
    kind = PickledCheckpoint if load_format == "pt" else SafetensorsCheckpoint
    return kind(weight_files(folder, load_format=load_format))


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """A safetensors file's tensors: name -> dtype, shape, data_offsets. Raises StartupError unless it all adds up."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise StartupError(f"{path}: its header claims {length} bytes of a file of {size}; it is damaged")
            header = json.loads(file.read(length))
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"{path}: its header cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise StartupError(f"{path}: its header is no JSON object")
    header.pop("__metadata__", None)
    _check_entries(path, header, size - 8 - length)
    return header


def _check_entries(path: Path, header: dict[str, Any], data_bytes: int) -> None:
    """Each tensor takes exactly its bytes; together they fill the file, without gap or overlap."""
    spans = []
    for name, entry in header.items():
        try:
            begin, end = entry["data_offsets"]
            numbers = [begin, end, *entry["shape"]]
            if len(numbers) > 2 + _MAX_DIMS or any(type(number) is not int or number < 0 for number in numbers):
                raise ValueError("no shape and offsets of a tensor")
            item_bytes = DTYPE_BYTES.get(str(entry["dtype"]))
            if item_bytes is None:
                raise StartupError(f"{path}: tensor {name!r} is of {entry['dtype']!r}, which is not read here")
            wanted = math.prod(entry["shape"]) * item_bytes
        except (KeyError, TypeError, ValueError) as error:
            raise StartupError(f"{path}: tensor {name!r} has a damaged entry: {error!r}") from error
        if end - begin != wanted:
            raise StartupError(f"{path}: tensor {name!r} claims bytes {begin} to {end} for shape {entry['shape']}")
        spans.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise StartupError(f"{path}: tensor {name!r} starts at {begin}, the one before it ends at {position}")
        position = end
    if position != data_bytes:
        raise StartupError(f"{path}: {data_bytes} bytes of data, {position} expected; it is truncated or damaged")


def _unpickled(path: Path) -> dict[str, torch.Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {reason_of(error)}") from error
    except Exception as error:  # damaged pickles raise whatever their bytes mean; torch's own words advise to run them
        raise StartupError(
            f"{path} cannot be read as plain tensors: it is damaged, or holds more than those ({type(error).__name__})"
        ) from error
    if not isinstance(loaded, dict):
        raise StartupError(f"{path} holds something else than named tensors")
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise StartupError(f"{path} holds something else than named tensors")
        if value.is_nested or value.layout is not torch.strided or value.device.type != "cpu":
            raise StartupError(f"{path}: tensor {name} is sparse, nested or without numbers; dense ones can be read")
    return loaded


def _unreadable(files: tuple[Path, ...], name: str, dtype: object) -> StartupError:
    return StartupError(f"{files[0].parent}: tensor {name} is stored as {dtype}; {', '.join(DTYPES)} can be read")
