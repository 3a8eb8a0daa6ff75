"""A draft head with its paged pool, ready to run steps: segments and states in, outputs and logits out.

As engine.runner.ModelRunner is for a whole model, with the same segments and slot table. One thread at a time may call
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from engine.attention import Attention, attention_backend
from engine.batch import Batch, BatchBuffers, Segment
from engine.config import FeatureSpec
from engine.kv_pool import KVPool
from engine.models.heads.base import Attend, Head
from kernels.attention import cpu
from kernels.native.build import CannotBuild
from kernels.native.library import open_library
from outrider import env
from outrider.telemetry import get_logger

DEFAULT_MAX_BATCH_TOKENS = 4096

log = get_logger(__name__)


class HeadStep(NamedTuple):
    """Of the rows whose logits were wanted, in the segments' order."""

    logits: torch.Tensor
    """fp32 [L, drafted]"""
    carried: torch.Tensor
    """[L, hidden]: the states of the rows that go on from these."""


class HeadRunner:
    """A head, its pool, and slot_table: int32 [max_sessions, head.max_len], row's position -> slot."""

    def __init__(
        self, head: Head, *, num_slots: int, max_sessions: int, attention: str = "auto",
        max_batch_tokens: int = DEFAULT_MAX_BATCH_TOKENS,
    ) -> None:  # fmt: skip
        block = head.config.block
        self.head = head
        self.slot_table = np.zeros((max_sessions, head.max_len), dtype=np.int32)
        self._buffers = BatchBuffers(
            self.slot_table, vocab_size=len(head.embedding), num_slots=num_slots, num_positions=head.max_len,
            max_tokens=max_batch_tokens,
        )  # fmt: skip
        with torch.inference_mode():
            self.pool = KVPool(block, FeatureSpec(), num_slots, head.dtype, head.device)
        self._attention = _attention(attention, head)
        self._scale = block.head_dim**-0.5

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The target's feature rows [T, feature_width], in any dtype, as states [T, hidden]."""
        with torch.inference_mode():
            return self.head.fuse(features.to(device=self.head.device, dtype=self.head.dtype))

    def forward(self, segments: Sequence[Segment], states: torch.Tensor, stage: int = 0) -> HeadStep:
        """One step of rows with `states` [T, hidden], in the segments' order.

        Raises ValueError for a segment whose numbers lie outside the head, its pool or the slot table.
        """
        batch = self._buffers.fill(segments)
        with torch.inference_mode():
            device = self.head.device
            tokens = torch.from_numpy(batch.tokens).to(device).long()
            positions = torch.from_numpy(batch.layout.positions).to(device).long()
            outputs = self.head.forward(tokens, states, positions, self._attend(batch), stage)
            self._buffers.remember(batch)
            rows = outputs[torch.from_numpy(batch.logit_rows).to(device)]
            if not len(rows):
                return HeadStep(rows.new_zeros((0, self.num_drafted), dtype=torch.float32), rows)
            return HeadStep(self.head.logits(rows), self.head.carried(rows))

    @property
    def num_drafted(self) -> int:
        """Tokens that it can draft: width of the logits."""
        return len(self.head.embedding) if self.head.tokens is None else len(self.head.tokens)

    def _attend(self, batch: Batch) -> Attend:
        layout = batch.layout
        slots = torch.from_numpy(layout.slots).to(self.head.device).long()

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k_pool, v_pool = self.pool.k[layer], self.pool.v[layer]
            k_pool.index_copy_(0, slots, k)
            v_pool.index_copy_(0, slots, v)
            return self._attention(q, k_pool, v_pool, layout, self._scale)

        return attend


def _attention(name: str, head: Head) -> Attention:
    """The backend of that name; auto on CPU: the C kernel, which reads keys where they lie, wherever it can be used."""
    if name != "auto" or head.device.type != "cpu" or not env.cpu_kernel():
        return attention_backend(name, head.device)
    if head.dtype not in cpu.POOL_DTYPES or head.config.block.head_dim % 16:
        return attention_backend(name, head.device)
    try:
        return partial(cpu.attention, library=open_library(env.home() / "kernels"))
    except (CannotBuild, OSError) as error:
        log.warning("C attention not used, drafting is slower", reason=str(error))
        return attention_backend(name, head.device)
