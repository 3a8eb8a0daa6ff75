"""Draft trees grown on a head by the C kernels: one call a step, from its newest nodes to the next ones."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from engine.models.heads.native import NativeHead
from kernels.native.library import CGrowth, address


class GrowingTrees:
    """B trees of S steps and K branches, in arrays that the next ones of the shape are grown in as well.

    arrays: those that growing fills, by grow.h's names: scores fp32 [B, M], tokens int32 [B, M], frontier and
    entry_tokens int32 [B, E], entry_parents int64 [B, E], masks bool [B, E, E].
    """

    def __init__(self, head: NativeHead, batch: int, num_steps: int, topk: int, arrays: Mapping[str, NDArray]) -> None:
        self._head, self._batch, self._num_steps, self._topk = head, batch, num_steps, topk
        self._arrays = dict(arrays)
        entries = topk * (num_steps - 1)
        self._rows = np.zeros((2, batch), np.int32)
        self._slots = np.zeros((batch, entries), np.int32)
        self._logits = torch.empty((batch * topk, head.num_logits))
        self.carried = torch.empty(0)
        """[B + B K (S - 1), hidden]: the roots' states, then those of each step's entries, tree by tree."""
        self._growth = CGrowth(
            batch=batch, num_steps=num_steps, topk=topk, num_logits=head.num_logits,
            state_bytes=head.hidden * head.dtype.itemsize, table_rows=self._rows[0].ctypes.data,
            lengths=self._rows[1].ctypes.data, slots=self._slots.ctypes.data, logits=self._logits.data_ptr(),
            **{name: array.ctypes.data for name, array in self._arrays.items()},
        )  # fmt: skip
        self._pointer = ctypes.byref(self._growth)

    def begin(
        self, tips: tuple[torch.Tensor, torch.Tensor, torch.Tensor], slot_table: NDArray[np.int32],
        table_rows: list[int], lengths: list[int], slots: NDArray[np.int32], *, names: torch.Tensor | None,
        num_drafted: int, num_read: int,
    ) -> None:  # fmt: skip
        """Below sequences of so many rows: what may follow them, [B, at least K] each, and their states [B, hidden].

        names: the target's ids of the head's, int64. ValueError for rows that do not fit the table, or too few tips.
        """
        chances, words, states = tips
        if max(lengths) + self._num_steps - 1 > slot_table.shape[1] or words.shape[1] < self._topk:
            raise ValueError(
                f"{self._num_steps} steps of {self._topk} below {max(lengths)} rows, with {words.shape[1]} tips: "
                f"the context has {slot_table.shape[1]}"
            )
        self._rows[0], self._rows[1], self._slots[:] = table_rows, lengths, slots
        count = self._batch * (1 + self._topk * (self._num_steps - 1))
        self.carried = torch.empty((count, self._head.hidden), dtype=self._head.dtype)
        self.carried[: self._batch] = states
        growth = self._growth
        growth.carried, growth.names = self.carried.data_ptr(), address(names)
        growth.num_drafted, growth.num_read = num_drafted, num_read
        growth.slot_table, growth.table_width = slot_table.ctypes.data, slot_table.shape[1]
        chances, words = chances.contiguous(), words.contiguous()
        self._head.library.outrider_grow_roots(
            self._pointer, chances.data_ptr(), words.data_ptr(), words.shape[1]
        )  # fmt: skip

    def step(self, step: int) -> None:
        """Step 1 to S - 1. MemoryError; ValueError where the head names a token that it has no embedding of."""
        done = self._head.library.outrider_grow_step(self._head.decoder, self._pointer, step)
        if done < 0:
            raise ValueError("the draft head named a token that is outside its own embedding")
        if not done:
            raise MemoryError(f"no memory for a step of {self._batch} trees")

    def states(self) -> list[torch.Tensor]:
        """What was carried, by step, the roots' first."""
        each = self._batch * self._topk
        return list(self.carried.split([self._batch] + [each] * (self._num_steps - 1)))
