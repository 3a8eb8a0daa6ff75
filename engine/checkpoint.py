"""The tensors of a model folder, mapped from its files; every header is checked before a byte is used.

Knows files, not models: which tensors there must be is engine/loader.py's business.
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
from outrider.errors import StartupError, reason_of
from outrider.text_files import read_json

INDEX_NAME = "model.safetensors.index.json"
PICKLED_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# What a trainer leaves beside its weights.
_NO_WEIGHTS = ("training_args.bin", "optimizer.*", "scheduler.*", "scaler.*", "rng_state*")
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
        dtype = self._headers[name]["dtype"]
        if dtype not in DTYPES:
            raise StartupError(
                f"{self.files[0].parent}: tensor {name} is stored as {dtype}; {', '.join(DTYPES)} can be read"
            )
        return self._file_of[name].get_tensor(name)


class TensorsCheckpoint(Checkpoint):
    """Tensors that are in memory already."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], files: Iterable[Path] = ()) -> None:
        self.files = tuple(files)
        self._tensors = tensors

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def tensor(self, name: str) -> torch.Tensor:
        if not self._tensors[name].is_floating_point():
            where = f"{self.files[0].parent}: " if self.files else ""
            raise StartupError(
                f"{where}tensor {name} is stored as {self._tensors[name].dtype}; a floating-point type is needed"
            )
        return self._tensors[name]


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


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor, not an empty one, holds neither NaN nor infinity."""
    # NaN passes through both; fifty times as fast as isfinite.
    return all(math.isfinite(bound) for bound in torch.aminmax(tensor))


def open_checkpoint(folder: Path, *, load_format: str) -> Checkpoint:
    """The weights of `folder`: safetensors (`auto`, `safetensors`), or pickled ones where `pt` allows them.

    Raises StartupError naming the file that is absent, damaged or not allowed.
    """
    if load_format == "pt":
        return _open_pickled(folder)
    if (folder / "model.safetensors").is_file():  # of both the whole one, as transformers does
        return SafetensorsCheckpoint([folder / "model.safetensors"])
    if (folder / INDEX_NAME).is_file():
        return SafetensorsCheckpoint(_indexed_files(folder))
    pickled = _pickled_files(folder)
    if pickled:
        raise StartupError(
            f"{folder} has only pickled weights ({pickled[0].name}), which can run code when read. Convert them to "
            "safetensors, or allow them with --load-format pt"
        )
    raise StartupError(f"{folder} has neither model.safetensors nor {INDEX_NAME}")


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """A safetensors file's tensors: name -> dtype, shape, data_offsets. Raises StartupError unless it all adds up."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise StartupError(f"{path} is no file")
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise StartupError(f"{path}: its header claims {length} bytes of a file of {size}; it is damaged")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise StartupError(f"{path} does not exist, but the model's index names it") from None
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


def _indexed_files(folder: Path) -> list[Path]:
    weight_map = read_json(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise StartupError(f"{folder / INDEX_NAME} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    bad = [name for name in names if not name.endswith(".safetensors") or not _is_inside(folder, name)]
    if bad:
        raise StartupError(f"{folder / INDEX_NAME} names {bad[0]!r}, which is no safetensors file of its folder")
    return [folder / name for name in names]


def _is_inside(folder: Path, name: str) -> bool:
    """Whether a shard stays in the model's folder, links followed; the hub's cache links to `blobs` two levels up."""
    try:
        target = (folder / name).resolve()
        if target.is_symlink():  # links in a ring lead nowhere; Python before 3.13 raises RuntimeError
            return False
    except (ValueError, RuntimeError, OSError):  # of what no file can be called
        return False
    homes = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        homes.append(folder.resolve().parent.parent / "blobs")
    return any(target.is_relative_to(home) for home in homes)


def _pickled_files(folder: Path) -> list[Path]:
    names = sorted(path for pattern in PICKLED_PATTERNS for path in folder.glob(pattern))
    return [path for path in names if not any(path.match(pattern) for pattern in _NO_WEIGHTS)]


def _open_pickled(folder: Path) -> Checkpoint:
    files = _pickled_files(folder)
    if not files:
        raise StartupError(f"{folder} has no .bin or .pt weights, which --load-format pt asks for")
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # damaged pickles raise whatever their bytes happen to mean
            raise StartupError(f"{path} cannot be read as plain tensors: {reason_of(error)}") from error
        if not isinstance(loaded, dict) or not all(
            isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in loaded.items()
        ):
            raise StartupError(f"{path} holds something else than named tensors")
        tensors.update(loaded)
    return TensorsCheckpoint(tensors, files)
