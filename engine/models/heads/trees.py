"""Draft trees grown on a head by the C kernels, from the rows that a verdict brings to the nodes of the tree."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.models.heads.native import NativeHead
from kernels.native.library import CGrowth, address
from outrider.tree_limits import most_nodes

Tips = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""What may follow the last rows of B sequences: chances fp32 and the target's ids int64, [B, at least K], falling; and
states [B, hidden] to go on from."""


class Given:
    """What a growth gives beside its nodes. One piece of memory: tensors are made of it when somebody wants them.

    Nobody does as long as each verdict is followed by one draft, and tensors take their time to make.
    """

    def __init__(self, batch: int, num_states: int, num_tips: int, hidden: int, dtype: torch.dtype) -> None:
        """num_tips: 0 where what may follow the last rows is known already."""
        self._shape, self._num_states, self._hidden, self._dtype = (batch, num_tips), num_states, hidden, dtype
        self._chances_at = -(-num_states * hidden * dtype.itemsize // 8) * 8
        self._words_at = self._chances_at + -(-4 * batch * num_tips // 8) * 8
        self._memory = (ctypes.c_char * (self._words_at + 8 * batch * num_tips))()

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Addresses of the states, the tips' chances and their ids."""
        first = ctypes.addressof(self._memory)
        return first, first + self._chances_at, first + self._words_at

    @property
    def states(self) -> torch.Tensor:
        """[B + B K (S - 1), hidden]: the roots', then those of each step's entries, tree by tree."""
        return self._tensor(self._dtype, 0, self._num_states, self._hidden)

    @property
    def tips(self) -> Tips:
        """What may follow the last rows."""
        chances = self._tensor(torch.float32, self._chances_at, *self._shape)
        words = self._tensor(torch.int64, self._words_at, *self._shape)
        return chances, words, self.states[: self._shape[0]]

    def _tensor(self, dtype: torch.dtype, first: int, rows: int, width: int) -> torch.Tensor:
        if not rows * width:
            return torch.empty(rows, width, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, offset=first, count=rows * width).view(rows, width)


class NativeTrees:
    """B trees of S steps and K branches, in arrays that the next ones of the shape are grown in as well (grow.h)."""

    def __init__(
        self, head: NativeHead, batch: int, num_steps: int, topk: int, *, slot_table: NDArray[np.int32],
        names: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """names: the target's ids of the head's, int64."""
        self._head, self._batch, self._num_steps, self._topk = head, batch, num_steps, topk
        entries, most = topk * (num_steps - 1), most_nodes(num_steps, topk)
        self._rows = np.zeros((4, batch), np.int32)
        self._behind_tokens = np.zeros(0, np.int32)
        self._slots = np.zeros(batch * entries, np.int32)
        self._slot_table, self._names = slot_table, names
        self.nodes = np.zeros((3, batch, most), np.int32)
        """Chosen ones' tokens, parents (-1 the root) and entries (-1: not run): of tree b the first counts[b], or as
        many as the steps that were run gave candidates."""
        self.chances = np.zeros((batch, most))
        """Probabilities of the nodes' paths."""
        self.given = Given(batch, 0, 0, head.hidden, head.dtype)
        """What is given of the trees that were begun last."""
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
            table_width=slot_table.shape[1], state_bytes=head.hidden * head.dtype.itemsize, names=address(names),
            **{name: array.ctypes.data for name, array in room.items()},
        )  # fmt: skip
        self._pointer = ctypes.byref(self._growth)

    def begin(
        self, table_rows: list[int], lengths: list[int], counts: list[int], slots: Sequence[int], *, num_drafted: int,
        num_read: int, least_reach: float, behind: Sequence[NDArray[np.int32]] = (), num_tips: int = 0,
    ) -> None:  # fmt: skip
        """Below sequences of so many rows, trees of so many nodes. ValueError for rows that do not fit the table.

        slots: [B E], tree by tree. least_reach: of the newest entries' chances of being accepted, below which no
        further step is run; 0: all are. behind: the tokens of each sequence's rows that were not run yet; `run_first`
        follows, and num_tips are given. Else `go_on_from` does.
        """
        width = self._slot_table.shape[1]
        if max(lengths) + self._num_steps - 1 > width:
            raise ValueError(f"{self._num_steps} steps below {max(lengths)} rows: the context has {width}")
        num_behind = list(map(len, behind)) or [0] * self._batch
        self._rows[:] = (table_rows, lengths, num_behind, counts)
        self._slots[:] = slots
        self._num_behind = num_rows = sum(num_behind)
        growth = self._growth
        if num_rows > len(self._behind_tokens):
            self._behind_tokens = np.zeros(2 * num_rows, np.int32)
            growth.behind_tokens = self._behind_tokens.ctypes.data
        if behind:
            self._behind_tokens[:num_rows] = behind[0] if self._batch == 1 else np.concatenate(behind)
        num_states = self._batch * (1 + self._topk * (self._num_steps - 1))
        self.given = given = Given(self._batch, num_states, num_tips, self._head.hidden, self._head.dtype)
        growth.carried, growth.tip_chances, growth.tip_words = given.addresses
        growth.num_tips, growth.num_drafted, growth.num_read = num_tips, num_drafted, num_read
        growth.least_reach = least_reach

    def go_on_from(self, tips: Tips) -> None:
        """All rows were run, and this may follow them. ValueError for too few tips."""
        chances, words, states = tips
        if words.shape[1] < self._topk:
            raise ValueError(f"{self._topk} branches of {words.shape[1]} tips")
        self.given.states[: self._batch] = states
        self._tips = chances, words = chances.contiguous(), words.contiguous()  # kept for C
        growth = self._growth
        growth.inputs, growth.num_tips = None, words.shape[1]
        growth.tip_chances, growth.tip_words = chances.data_ptr(), words.data_ptr()

    def run_first(self, inputs: torch.Tensor, first: int, end: int, *, are_states: bool) -> None:
        """The last rows of each sequence are run in step 0, on states, or on features, which the head fuses.

        They are rows first..end-1 of `inputs`, [any, hidden or feature width].
        """
        width, dtype = self._head.hidden if are_states else self._head.input_width, self._head.dtype
        if end - first != self._num_behind or inputs.shape[1] != width:
            raise ValueError(f"{end - first} rows of {inputs.shape[1]} numbers for {self._num_behind} of {width}")
        if inputs.dtype is not dtype or not inputs.is_contiguous():
            inputs, first = inputs[first:end].to(dtype).contiguous(), 0
        self._inputs = inputs  # kept for C
        self._growth.inputs = inputs.data_ptr() + first * width * dtype.itemsize
        self._growth.inputs_are_features = not are_states

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
