"""The target's states kept on disk, so that a head is trained without running the target.

Of each shard of data, known by what it holds, there is a file of rows, bf16 or as the target computes, and one that
says how many of each conversation are there. `train data` may write them as it goes, for it computes them anyway; what
is missing is computed while training and kept. They hold what every kind of head reads: the states entering EAGLE-3's
usual layers, and the last one. (3 + 1) * hidden * 2 bytes a token: 4.6 GB for a million tokens of SmolLM2-135M.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.runner import ModelRunner
from engine.whole import put_in_place, written
from outrider.errors import StartupError
from training.batches import Batch
from training.data.store import Origin, Shard
from training.kinds import usual_aux_layers
from training.target_states import States, TargetStates

_META = "states.json"


def stored_layers(num_layers: int) -> tuple[int, ...]:
    """Layers whose entering states are kept, for a target of that many; num_layers stands for the last state."""
    return tuple(sorted({*(usual_aux_layers(num_layers) if num_layers >= 3 else ()), num_layers}))


class StateFiles:
    """Rows of conversations, as `runner` computes them; its features are `layers`."""

    def __init__(self, folder: Path, runner: ModelRunner, layers: Sequence[int]) -> None:
        self._folder = folder
        self._dtype = runner.dtype
        self._row_bytes = len(layers) * runner.config.hidden_size * runner.dtype.itemsize
        self._open: dict[Shard, tuple[np.memmap[Any, Any], np.memmap[Any, Any]]] = {}
        facts = {"target": runner.numerics_id, "layers": list(layers), "row_bytes": self._row_bytes}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / _META
            if not path.exists():  # others may begin together with this one
                written(path, lambda file: file.write_text(json.dumps(facts), encoding="utf-8"))
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StartupError(f"states cannot be kept in {folder}: {error}") from error
        if found != facts:
            raise StartupError(f"{folder} holds states of {found}, not of {facts}; name another --store-states")

    def add_shard(self, shard: Shard, conversations: Sequence[tuple[int, torch.Tensor | None]]) -> None:
        """A new shard's: lengths of its conversations, and of each the first rows [<= length, width], if any."""
        rows, counts = self._paths(shard)
        found = [0 if states is None else len(states) for _, states in conversations]
        with _partial(rows).open("wb") as file:
            for count, (length, states) in zip(found, conversations, strict=True):
                if states is not None:
                    file.write(_bytes(states).tobytes())
                file.write(bytes((length - count) * self._row_bytes))
        np.array(found, np.int32).tofile(_partial(counts))
        for path in (rows, counts):
            put_in_place(_partial(path), path)

    def map_shard(self, shard: Shard) -> None:
        """Opens a shard's files, made of zeros where there are none."""
        if shard not in self._open:
            rows, counts = self._paths(shard)
            self._open[shard] = (
                _mapped(rows, "uint8", (shard.num_tokens, self._row_bytes)),
                _mapped(counts, "int32", (shard.num_conversations,)),
            )

    def has(self, origin: Origin, count: int) -> bool:
        """Whether the first `count` rows of a conversation are there."""
        return bool(self._open[origin.shard][1][origin.conversation] >= count)

    def read(self, origin: Origin, count: int) -> torch.Tensor:
        """Reads the `count` rows from `origin` on, [count, width]."""
        stored = np.array(self._open[origin.shard][0][origin.first_token : origin.first_token + count])
        return torch.from_numpy(stored).view(self._dtype)

    def write(self, origin: Origin, states: torch.Tensor) -> None:
        """The first rows [count, width] of a conversation."""
        stored, counts = self._open[origin.shard]
        stored[origin.first_token : origin.first_token + len(states)] = _bytes(states)
        # Rows beyond these, of a run with a larger --max-len, are good still.
        counts[origin.conversation] = max(counts[origin.conversation], len(states))

    def _paths(self, shard: Shard) -> tuple[Path, Path]:
        return self._folder / f"rows-{shard.key}.bin", self._folder / f"counts-{shard.key}.bin"


class StateStore:
    """Called with a batch as a target is with conversations: computes what is not there, and keeps it.

    The last token's state has no use, nothing follows it; its row may be zeros.
    """

    def __init__(self, folder: Path, target: TargetStates) -> None:
        self._files = StateFiles(folder, target.runner, target.kept_layers)
        self._target = target

    def __call__(self, batch: Batch) -> States:
        """See TargetStates."""
        places = list(zip(batch.origins, map(len, batch.conversations), strict=True))
        for origin, _ in places:
            self._files.map_shard(origin.shard)
        if not all(self._files.has(origin, length - 1) for origin, length in places):
            rows = self._target.rows(batch.conversations)
            for row, (origin, length) in enumerate(places):
                self._files.write(origin, rows[row, :length])
            return self._target.of_rows(rows)
        longest = max(length for _, length in places)
        rows = torch.zeros((len(places), longest, self._target.row_width), dtype=self._target.runner.dtype)
        for row, (origin, length) in enumerate(places):
            rows[row, : length - 1] = self._files.read(origin, length - 1)
        return self._target.of_rows(rows.to(self._target.device))


def _bytes(rows: torch.Tensor) -> np.ndarray:
    return rows.cpu().contiguous().view(torch.uint8).numpy()


def _partial(path: Path) -> Path:
    return path.with_suffix(".partial")


def _mapped(path: Path, dtype: str, shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """A file of that size, holes where nothing was written; several processes may map it at once."""
    with path.open("ab") as file:
        file.truncate(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return np.memmap(path, dtype=dtype, mode="r+", shape=shape)
