"""The target's states kept on disk, so that from the second epoch on the target need not be run.

Beside each shard of data stands a file of rows, bf16 or as the target computes, and one that says how many rows of each
conversation are there. EAGLE-3's take (3 + 1) * hidden * 2 bytes a token: 4.6 GB for a million tokens of SmolLM2-135M.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.errors import StartupError
from training.batches import Batch, Dataset
from training.data.store import Origin
from training.target_states import States, TargetStates

_META = "states.json"


class StateStore:
    """Called with a batch of a dataset as a target is with conversations: computes what is not there, and keeps it."""

    def __init__(self, folder: Path, target: TargetStates, dataset: Dataset) -> None:
        self._folder = folder
        self._target = target
        self._dataset = dataset
        self._row_bytes = target.row_width * target.runner.dtype.itemsize
        self._open: dict[int, tuple[np.memmap[Any, Any], np.memmap[Any, Any]]] = {}
        facts = {
            "target": target.runner.numerics_id, "features": str(target.features), "row_bytes": self._row_bytes,
            "data": str(dataset.folder.resolve()),
        }  # fmt: skip
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / _META
            if not path.exists():
                path.write_text(json.dumps(facts), encoding="utf-8")
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StartupError(f"states cannot be kept in {folder}: {error}") from error
        if found != facts:
            raise StartupError(f"{folder} holds states of {found}, not of {facts}; name another --store-states")

    def __call__(self, batch: Batch) -> States:
        """See TargetStates."""
        places = batch.origins
        lengths = [len(tokens) for tokens in batch.conversations]
        if all(self._has(origin, length) for origin, length in zip(places, lengths, strict=True)):
            rows = torch.zeros((len(places), max(lengths), self._target.row_width), dtype=self._target.runner.dtype)
            for row, (origin, length) in enumerate(zip(places, lengths, strict=True)):
                rows[row, :length] = self._read(origin, length)
            return self._target.of_rows(rows.to(self._target.device))
        rows = self._target.rows(batch.conversations)
        for row, (origin, length) in enumerate(zip(places, lengths, strict=True)):
            self._write(origin, rows[row, :length])
        return self._target.of_rows(rows)

    def _files(self, shard: int) -> tuple[np.memmap[Any, Any], np.memmap[Any, Any]]:
        """Rows uint8 [tokens, bytes] and counts int32 [conversations] of a shard, both zeros at first."""
        if shard not in self._open:
            num_tokens, num_conversations = self._dataset.shard_size(shard)
            self._open[shard] = (
                _mapped(self._folder / f"rows-{shard:05}.bin", "uint8", (num_tokens, self._row_bytes)),
                _mapped(self._folder / f"counts-{shard:05}.bin", "int32", (num_conversations,)),
            )
        return self._open[shard]

    def _has(self, origin: Origin, length: int) -> bool:
        return bool(self._files(origin.shard)[1][origin.conversation] >= length)

    def _read(self, origin: Origin, length: int) -> torch.Tensor:
        stored = np.array(self._files(origin.shard)[0][origin.first_token : origin.first_token + length])
        return torch.from_numpy(stored).view(self._target.runner.dtype)

    def _write(self, origin: Origin, rows: torch.Tensor) -> None:
        stored, counts = self._files(origin.shard)
        stored[origin.first_token : origin.first_token + len(rows)] = rows.cpu().contiguous().view(torch.uint8).numpy()
        counts[origin.conversation] = len(rows)


def _mapped(path: Path, dtype: str, shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """A file of that size, holes where nothing was written; several processes may map it at once."""
    with path.open("ab") as file:
        file.truncate(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return np.memmap(path, dtype=dtype, mode="r+", shape=shape)
