"""Draft trees grown on a head by the C kernels, from the rows that a verdict brings to the nodes of the tree."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.models.heads.native import NativeHead
from kernels.native.library import CGrowth, address

Tips = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""What may follow the last rows of B sequences: chances fp32 and the target's ids int64, [B, at least K], falling; and
states [B, hidden] to go on from."""


class GrowingTrees:
    """B trees of S steps and K branches, in arrays that the next ones of the shape are grown in as well (grow.h)."""

    def __init__(
        self, head: NativeHead, batch: int, num_steps: int, topk: int, *, slot_table: NDArray[np.int32],
        names: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """names: the target's ids of the head's, int64."""
        self._head, self._batch, self._num_steps, self._topk = head, batch, num_steps, topk
        entries, most = topk * (num_steps - 1), topk + (num_steps - 1) * topk * topk
        self._rows = np.zeros((4, batch), np.int32)
        self._behind_tokens = np.zeros(0, np.int32)
        self._slots = np.zeros((batch, entries), np.int32)
        self._slot_table, self._names = slot_table, names
        self.nodes = np.zeros((3, batch, most), np.int32)
        """Chosen ones' tokens, parents (-1 the root) and entries (-1: not run): of tree b the first counts[b], or as
        many as the steps that were run gave candidates."""
        self.chances = np.zeros((batch, most))
        """Of their paths."""
        self.carried = torch.empty(0)
        """[B + B K (S - 1), hidden]: the roots' states, then those of each step's entries, tree by tree."""
        room = {
            "slots": self._slots, "nodes": self.nodes, "chances": self.chances,
            "scores": np.zeros((batch, most), np.float32), "tokens": np.zeros((batch, most), np.int32),
            "frontier": np.zeros((batch, entries), np.int32), "entry_tokens": np.zeros((batch, entries), np.int32),
            "entry_parents": np.zeros((batch, entries), np.int64),
            "masks": np.zeros((batch, entries, entries), np.bool_),
            "logits": np.zeros((batch * topk, head.num_logits), np.float32), "slot_table": slot_table,
        } | dict(zip(("table_rows", "lengths", "behind", "counts"), self._rows, strict=True))  # fmt: skip
        self._room = room
        self._growth = CGrowth(
            batch=batch, num_steps=num_steps, topk=topk, num_logits=head.num_logits,
            table_width=slot_table.shape[1], state_bytes=head.hidden * head.dtype.itemsize,
            inputs_are_features=head.fuses, names=address(names),
            **{name: array.ctypes.data for name, array in room.items()},
        )  # fmt: skip
        self._pointer = ctypes.byref(self._growth)

    def begin(
        self, table_rows: list[int], lengths: list[int], counts: list[int], slots: NDArray[np.int32], *,
        num_drafted: int, num_read: int, least_reach: float,
    ) -> None:  # fmt: skip
        """Below sequences of so many rows, trees of so many nodes. ValueError for rows that do not fit the table.

        least_reach: of the newest entries' chances of being accepted, below which no further step is run; 0: all are.
        """
        width = self._slot_table.shape[1]
        if max(lengths) + self._num_steps - 1 > width:
            raise ValueError(f"{self._num_steps} steps below {max(lengths)} rows: the context has {width}")
        self._rows[0], self._rows[1], self._rows[3], self._slots[:] = table_rows, lengths, counts, slots
        count = self._batch * (1 + self._topk * (self._num_steps - 1))
        self.carried = torch.empty((count, self._head.hidden), dtype=self._head.dtype)
        growth = self._growth
        growth.carried, growth.num_drafted, growth.num_read = self.carried.data_ptr(), num_drafted, num_read
        growth.least_reach = least_reach

    def go_on_from(self, tips: Tips) -> None:
        """All rows were run, and this may follow them. ValueError for too few tips."""
        chances, words, states = tips
        if words.shape[1] < self._topk:
            raise ValueError(f"{self._topk} branches of {words.shape[1]} tips")
        self.carried[: self._batch] = states
        self._growth.inputs = None
        self._take(chances.contiguous(), words.contiguous())

    def run_first(self, tokens: Sequence[NDArray[np.int32]], inputs: torch.Tensor, num_tips: int) -> Tips:
        """The last rows of each sequence are run in step 0, on features where the head fuses them, else on states.

        Returns what may follow, filled then.
        """
        self._rows[2] = behind = [len(own) for own in tokens]
        num_rows = sum(behind)
        if inputs.dtype is not self._head.dtype or not inputs.is_contiguous():
            inputs = inputs.to(self._head.dtype).contiguous()
        if inputs.shape != (num_rows, self._head.input_width):
            raise ValueError(f"{tuple(inputs.shape)} numbers for {num_rows} rows of {self._head.input_width}")
        if num_rows > len(self._behind_tokens):
            self._behind_tokens = np.zeros(2 * num_rows, np.int32)
            self._growth.behind_tokens = self._behind_tokens.ctypes.data
        np.concatenate(tokens, out=self._behind_tokens[:num_rows])
        self._inputs, self._growth.inputs = inputs, inputs.data_ptr()
        shape = self._batch, num_tips
        chances, words = torch.empty(shape), torch.empty(shape, dtype=torch.int64)
        self._take(chances, words)
        return chances, words, self.carried[: self._batch]

    def grow(self, first: int, end: int) -> int:
        """Steps first..end-1 of 0..S-1; how many were run of all. Fewer than `end`: it ended early.

        After the last one the nodes are there. MemoryError; ValueError where the head is to read a token that it has no
        embedding of.
        """
        done = self._head.library.outrider_grow(self._head.decoder, self._pointer, first, end)
        if done < 0:
            raise ValueError("the draft head named a token that is outside its own embedding")
        if not done:
            raise MemoryError(f"no memory for a step of {self._batch} trees")
        return self._growth.num_run

    def _take(self, chances: torch.Tensor, words: torch.Tensor) -> None:
        growth = self._growth
        growth.tip_chances, growth.tip_words, growth.num_tips = chances.data_ptr(), words.data_ptr(), words.shape[1]
        self._tips = chances, words  # kept for C
