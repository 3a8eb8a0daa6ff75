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

import numpy as np
import torch

from engine.runner import ModelRunner
from engine.whole import written
from outrider.errors import StartupError
from training.batches import Batch
from training.data.store import Origin, Shard
from training.kinds import usual_aux_layers
from training.outputs import write_file, writing
from training.target_states import States, TargetStates

_META = "states.json"
_COUNT_BYTES = 4


def stored_layers(num_layers: int) -> tuple[int, ...]:
    """Layers whose entering states are kept, for a target of that many; num_layers stands for the last state."""
    return tuple(sorted({*(usual_aux_layers(num_layers) if num_layers >= 3 else ()), num_layers}))


class StateFiles:
    """Rows of conversations, as `runner` computes them; its features are `layers`."""

    def __init__(self, folder: Path, runner: ModelRunner, layers: Sequence[int]) -> None:
        self._folder = folder
        self._dtype = runner.dtype
        self._row_bytes = len(layers) * runner.config.hidden_size * runner.dtype.itemsize
        self._there: set[Shard] = set()
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

        def write_rows(path: Path) -> None:
            with path.open("wb") as file:
                for count, (length, states) in zip(found, conversations, strict=True):
                    if states is not None:
                        file.write(_bytes(states).tobytes())
                    file.write(bytes((length - count) * self._row_bytes))

        write_file(rows, "states", write_rows)
        write_file(counts, "states", lambda path: path.write_bytes(np.array(found, np.int32).tobytes()))

    def has_shard(self, shard: Shard) -> bool:
        """Whether a shard has files, of rows or only of zeros."""
        return self._paths(shard)[0].exists()

    def remove_shard(self, shard: Shard) -> None:
        """Removes the files of a shard that did not come about."""
        for path in self._paths(shard):
            path.unlink(missing_ok=True)

    def make_shard(self, shard: Shard) -> None:
        """Makes a shard's files, of zeros, where there are none."""
        if shard not in self._there:
            rows, counts = self._paths(shard)
            with writing(self._folder, "states"):
                _make(rows, shard.num_tokens * self._row_bytes)
                _make(counts, shard.num_conversations * _COUNT_BYTES)
            self._there.add(shard)

    def has(self, origin: Origin, count: int) -> bool:
        """Whether the first `count` rows of a conversation are there."""
        return self._count(origin) >= count

    def read(self, origin: Origin, count: int) -> torch.Tensor:
        """Reads the `count` rows from `origin` on, [count, width]."""
        rows, _ = self._paths(origin.shard)
        stored = np.fromfile(rows, np.uint8, count * self._row_bytes, offset=origin.first_token * self._row_bytes)
        return torch.from_numpy(stored.reshape(count, self._row_bytes)).view(self._dtype)

    def write(self, origin: Origin, states: torch.Tensor) -> None:
        """The first rows [count, width] of a conversation."""
        rows, counts = self._paths(origin.shard)
        # Rows beyond these, of a run with a larger --max-len, are good still.
        count = np.int32(max(self._count(origin), len(states)))
        with writing(self._folder, "states"):
            _write_at(rows, origin.first_token * self._row_bytes, _bytes(states).tobytes())
            _write_at(counts, origin.conversation * _COUNT_BYTES, count.tobytes())

    def _count(self, origin: Origin) -> int:
        _, counts = self._paths(origin.shard)
        return int(np.fromfile(counts, np.int32, 1, offset=origin.conversation * _COUNT_BYTES)[0])

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
            self._files.make_shard(origin.shard)
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


def _make(path: Path, num_bytes: int) -> None:
    """A file of that size, holes where nothing was written; several processes may write to it at once."""
    with path.open("ab") as file:
        file.truncate(num_bytes)


def _write_at(path: Path, position: int, data: bytes) -> None:
    """Not through memory that is mapped: a disk that is full would end the process."""
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)
