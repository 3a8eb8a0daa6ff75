"""What drafts: a small language model, or a head over the target's states, each over a pool of its own.

Both take segments and give, for the last row of each, its likeliest next tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from draft_service.drafters.growing_graphs import TreeGraphs, TreeSizes
from draft_service.drafters.growing_native import NativeGrower
from draft_service.drafters.kv import DraftCache
from engine.batch import DeviceRows, Segment
from engine.cpu_kernels import cpu_kernels
from engine.models.heads.runner import HeadRunner
from engine.runner import ModelRunner
from kernels.likeliest import Likeliest, likeliest, native_likeliest
from kernels.transfer import to_device


class Tips(NamedTuple):
    """What may follow the last rows of B sequences."""

    probabilities: torch.Tensor
    """fp32 [B, T], falling; a softmax at temperature 1 over all that can be drafted."""
    tokens: torch.Tensor
    """int64 [B, T], the target's ids."""
    states: torch.Tensor | None
    """[B, hidden]: a head's own states, which the next rows go on from; None for a language model."""

    def named(self) -> list[list[tuple[int, float]]]:
        """Tokens and their probabilities, falling, for each row."""
        rows = zip(self.tokens.tolist(), self.probabilities.tolist(), strict=True)
        return [list(zip(tokens, chances, strict=True)) for tokens, chances in rows]

    @classmethod
    def joined(cls, tips: Sequence[Tip]) -> Tips:
        """Joins the tips of several sequences, in order. What ran together stays as it is."""
        batch, rows = tips[0].batch, [tip.row for tip in tips]
        if all(tip.batch is batch for tip in tips):
            if rows == list(range(len(batch.tokens))):
                return batch
            index = to_device(np.array(rows), batch.tokens.device)
            states = None if batch.states is None else batch.states.index_select(0, index)
            return cls(batch.probabilities.index_select(0, index), batch.tokens.index_select(0, index), states)
        with_states = [state for tip in tips if (state := tip.states) is not None]
        return cls(
            torch.cat([tip.batch.probabilities[tip.row : tip.row + 1] for tip in tips]),
            torch.cat([tip.batch.tokens[tip.row : tip.row + 1] for tip in tips]),
            torch.cat(with_states) if with_states else None,
        )


class Tip:
    """One sequence's row of what ran together, which may be made when it is first asked for."""

    __slots__ = ("_batch", "row")

    def __init__(self, batch: Tips | Callable[[], Tips], row: int) -> None:
        """batch: if called, the same for all of its rows."""
        self._batch, self.row = batch, row

    @property
    def batch(self) -> Tips:
        """The tips of all rows."""
        if callable(self._batch):
            self._batch = self._batch()
        return self._batch

    @property
    def states(self) -> torch.Tensor | None:
        """[1, hidden]; None for a language model."""
        return None if self.batch.states is None else self.batch.states[self.row : self.row + 1]


class DraftModel(Protocol):
    """A forward pass over a cache. One thread at a time may call it."""

    cache: DraftCache
    max_batch_tokens: int
    reads_states: bool
    device: torch.device

    @property
    def num_read(self) -> int:
        """Ids below this can be read."""
        ...

    @property
    def num_drafted(self) -> int:
        """How many tokens can be drafted."""
        ...

    @property
    def runs_apart(self) -> bool:
        """Whether it runs on a device that the host need not wait for between steps."""
        ...

    def run(
        self, segments: list[Segment], states: torch.Tensor | None, num_top: int, stage: int = 0,
        rows: DeviceRows | None = None,
    ) -> Tips:  # fmt: skip
        """One step; tips of the rows whose logits were wanted. states [rows, hidden] where the model reads them.

        rows: in place of the segments' tokens and masks; of a model that runs apart.
        """
        ...

    @property
    def grower(self) -> NativeGrower | None:
        """Grows trees of its nodes, where the C kernels can."""
        ...

    @property
    def trees(self) -> TreeGraphs | None:
        """Graphs of whole trees, for a model that runs apart."""
        ...

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The target's feature rows [T, width] as states [T, hidden]."""
        ...

    def limit_vocabulary(self, vocab_size: int) -> None:
        """Has only ids below `vocab_size` drafted from now on: the target's may be padded less."""
        ...


class LanguageModel:
    """Any model that the engine runs; token_map: int64 [n], its `output_rows`: all that may be drafted (FR-Spec)."""

    reads_states = False
    grower = None
    trees = None

    def __init__(
        self, runner: ModelRunner, num_slots: int, *, max_batch_tokens: int, token_map: torch.Tensor | None = None
    ) -> None:
        self.cache = DraftCache(runner.slot_table, num_slots)
        self.max_batch_tokens = max_batch_tokens
        if token_map is not None and runner.num_outputs != len(token_map):
            raise ValueError(f"a map of {len(token_map)} tokens for a runner of {runner.num_outputs} outputs")
        self.device = runner.device
        self._runner = runner
        self._limit = runner.config.vocab_size
        self._token_map = None if token_map is None else token_map.to(self.device)
        self._columns: torch.Tensor | None = None  # of the logits, where some of the map's ids are too high
        self._likeliest = _likeliest_on(self.device)
        self.runs_apart = self.device.type != "cpu" and runner.takes_device_rows

    @property
    def num_read(self) -> int:
        """See DraftModel."""
        return self._runner.config.vocab_size

    @property
    def num_drafted(self) -> int:
        """See DraftModel."""
        return self._limit if self._token_map is None else len(self._token_map)

    def run(
        self, segments: list[Segment], states: torch.Tensor | None, num_top: int, stage: int = 0,
        rows: DeviceRows | None = None,
    ) -> Tips:  # fmt: skip
        """See DraftModel."""
        logits = self._runner.forward(segments, rows)
        if self._token_map is None:
            logits = logits[:, : self._limit]
        elif self._columns is not None:
            logits = logits[:, self._columns]
        return Tips(*_named(self._likeliest(logits, num_top), self._token_map), None)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """See DraftModel; a language model reads no features."""
        return features

    def limit_vocabulary(self, vocab_size: int) -> None:
        """See DraftModel."""
        self._limit = min(self._limit, vocab_size)
        if self._token_map is None or not bool((self._token_map >= vocab_size).any()):
            return
        kept = (self._token_map < vocab_size).nonzero().flatten()
        self._columns = kept if self._columns is None else self._columns[kept]
        self._token_map = self._token_map[kept]


class HeadModel:
    """A draft head. graphs: of the trees that it is to grow, where it has graphs of its steps."""

    reads_states = True

    def __init__(
        self, runner: HeadRunner, num_slots: int, *, max_batch_tokens: int, graphs: TreeSizes | None = None
    ) -> None:
        self.cache = DraftCache(runner.slot_table, num_slots)
        self.max_batch_tokens = max_batch_tokens
        self.device = runner.head.device
        self._runner = runner
        self.num_read = len(runner.head.embedding)
        self.feature_width = runner.head.config.feature_width
        """Numbers in a feature row."""
        self._limit = runner.num_drafted
        self._likeliest = _likeliest_on(self.device)
        self.runs_apart = self.device.type != "cpu"
        self.grower = None
        if runner.native is not None:
            self.grower = NativeGrower(runner, num_read=self.num_read)
        self._trees: TreeGraphs | None = None
        if runner.capturing is not None and graphs is not None and runner.head.num_stages == 1:
            self._trees = TreeGraphs(runner, runner.capturing, graphs)

    @property
    def num_drafted(self) -> int:
        """See DraftModel."""
        return self._limit

    @property
    def trees(self) -> TreeGraphs | None:
        """See DraftModel; they know of no limit."""
        return self._trees if self._limit == self._runner.num_drafted else None

    @property
    def num_stages(self) -> int:
        """Networks that take turns."""
        return self._runner.head.num_stages

    def run(
        self, segments: list[Segment], states: torch.Tensor | None, num_top: int, stage: int = 0,
        rows: DeviceRows | None = None,
    ) -> Tips:  # fmt: skip
        """See DraftModel."""
        if states is None:
            raise ValueError("a draft head goes on from states")
        step = self._runner.forward(segments, states, stage, rows)
        top, is_whole = step.top, self._limit == self._runner.num_drafted
        if top is not None and is_whole and num_top <= top[0].shape[1]:
            found = top[0][:, :num_top], top[1][:, :num_top]
        else:
            found = self._likeliest(step.logits[:, : self._limit], num_top)
        return Tips(*_named(found, self._runner.head.tokens), step.carried)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """See DraftModel."""
        return self._runner.fuse(features)

    def limit_vocabulary(self, vocab_size: int) -> None:
        """See DraftModel. A head was checked against its target; one with a vocabulary of its own stays as it is."""
        if self._runner.head.tokens is None:
            self._limit = min(self._limit, vocab_size)


def on_host(values: torch.Tensor) -> NDArray[Any]:
    """A tensor as an array: the same memory where it is the host's already."""
    return values.numpy() if values.device.type == "cpu" else values.cpu().numpy()


def _likeliest_on(device: torch.device) -> Likeliest:
    """The C kernel on CPU, where it can be had."""
    library = cpu_kernels() if device.type == "cpu" else None
    return likeliest if library is None else native_likeliest(library)


def _named(
    found: tuple[torch.Tensor, torch.Tensor], names: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Probabilities and the target's ids from those of output rows, which are the same where there are no `names`."""
    probabilities, rows = found
    return probabilities, rows if names is None else names[rows]
