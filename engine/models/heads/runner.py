"""A draft head with its paged pool, ready to run steps: segments and states in, outputs and logits out.

As engine.runner.ModelRunner is for a whole model, with the same segments and slot table. One thread at a time may call
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from engine.attention import DRAFT_ATTENTION, Attention, AttentionChoice, attention_backend, check_heads, fused_rope
from engine.batch import Batch, BatchBuffers, DeviceRows, Segment, of_each_size
from engine.cpu_kernels import cpu_kernels
from engine.execution import Execution, GraphSizes
from engine.feature_spec import FeatureSpec
from engine.graphs import Capturing, capturing_by_triton, usable_sizes
from engine.kv_pool import KVPool
from engine.models.heads.base import Attend, Head
from engine.models.heads.graphs import GraphedHead
from engine.models.heads.native import NativeHead
from engine.models.heads.step import HeadStep
from engine.models.llama import StepRows
from engine.runner import DEFAULT_MAX_BATCH_TOKENS
from kernels.attention import cpu
from kernels.attention.layout import AttentionLayout
from kernels.attention.pool import store
from kernels.attention.triton_blocks import Heads
from kernels.native.library import WIDTH_UNIT
from kernels.rope import apply_rope


class HeadRunner:
    """A head, its pool, and slot_table: int32 [max_sessions, head.max_len], row's position -> slot."""

    def __init__(
        self, head: Head, *, num_slots: int, max_sessions: int, attention: str = "auto",
        max_batch_tokens: int = DEFAULT_MAX_BATCH_TOKENS, graphs: GraphSizes | None = None,
    ) -> None:  # fmt: skip
        """graphs: the steps that are captured where there can be CUDA graphs.

        StartupError where they are required and cannot be, and for heads of a shape that its attention does not cover.
        """
        block, choice = head.config.block, AttentionChoice(attention, flag=DRAFT_ATTENTION)
        check_heads(choice, block, head.dtype, head.device)
        self.head = head
        self.slot_table = np.zeros((max_sessions, head.max_len), dtype=np.int32)
        self._buffers = BatchBuffers(
            self.slot_table, vocab_size=len(head.embedding), num_slots=num_slots, num_positions=head.max_len,
            max_tokens=max_batch_tokens,
        )  # fmt: skip
        sizes = usable_sizes(Execution(choice, graphs=graphs), head.device)
        with torch.inference_mode():
            self.pool = KVPool(block, FeatureSpec(), num_slots, head.dtype, head.device, with_padding=sizes is not None)
        self._attention = _attention(attention, head)
        self._rope_and_store = fused_rope(choice, head.device, head.dtype)
        self._scale = block.head_dim**-0.5
        self.native: NativeHead | None = NativeHead.of(head, self.pool) if attention == "auto" else None
        self.capturing: Capturing | None = None
        """How graphs are made of its steps, where they are."""
        self._graphs = None
        if head.device.type == "cuda":
            self.run_each_size()
        if sizes is not None:
            heads = Heads(block.num_heads, block.num_kv_heads, block.head_dim, head.dtype)
            self.capturing = capturing_by_triton(self._attention, heads, self.pool)
            self._graphs = GraphedHead(head, self.run, sizes, self.capturing)
            self._graphs.capture()

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The target's feature rows [T, feature_width], in any dtype, as states [T, hidden]."""
        with torch.inference_mode():
            return self.head.fuse(features.to(device=self.head.device, dtype=self.head.dtype))

    def forward(
        self, segments: Sequence[Segment], states: torch.Tensor, stage: int = 0, rows: DeviceRows | None = None
    ) -> HeadStep:
        """One step of rows with `states` [T, hidden], in the segments' order.

        rows: in place of the segments' tokens and masks; only where there is no `native`. Raises ValueError for a
        segment whose numbers lie outside the head, its pool or the slot table.
        """
        batch = self._buffers.fill(segments, rows)
        with torch.inference_mode():
            if self.native is not None:
                step = self.native.forward(batch, states)
            else:
                step = None if self._graphs is None else self._graphs.forward(batch, states, stage)
            if step is None:
                step = self.run(StepRows.of(batch, self.head.device), states, batch.layout, stage)
                step = step._replace(logits=step.logits.float())
            self._buffers.remember(batch)
            return step

    def run_each_size(self) -> None:
        """Runs steps of all sizes on slots that nobody may use yet: compiles what they need where no graph has them."""
        hidden, head = self.head.config.block.hidden_size, self.head
        most_rows = min(self._buffers.max_tokens, self._buffers.num_slots, head.max_len)
        for segment in of_each_size(most_rows, head.max_len):
            states = torch.zeros((len(segment.tokens), hidden), dtype=head.dtype, device=head.device)
            for stage in range(head.num_stages):
                self.forward([segment], states, stage)

    def laid_out(self, segments: Sequence[Segment]) -> Batch:
        """Segments as rows, checked as forward does, for who runs them; good until the next step."""
        return self._buffers.fill(segments)

    def run(self, rows: StepRows, states: torch.Tensor, layout: AttentionLayout, stage: int) -> HeadStep:
        """A step whose rows are in place on the device; those beyond the layout's are padding. Logits of any dtype."""
        attend = self._attend(rows.slots, layout)
        outputs = self.head.forward(rows.tokens.long(), states, rows.positions.long(), attend, stage)
        wanted = outputs if rows.logit_rows is None else outputs[rows.logit_rows]
        if not len(wanted):
            return HeadStep(wanted.new_zeros((0, self.num_drafted)), wanted)
        return HeadStep(self.head.narrow_logits(wanted), self.head.carried(wanted))

    @property
    def num_drafted(self) -> int:
        """Tokens that it can draft: width of the logits."""
        return self.head.num_drafted

    def _attend(self, slots: torch.Tensor, layout: AttentionLayout) -> Attend:
        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: torch.Tensor
        ) -> torch.Tensor:  # fmt: skip
            k_pool, v_pool = self.pool.k[layer], self.pool.v[layer]
            if self._rope_and_store is not None:
                q = self._rope_and_store(q, k, v, rope, k_pool, v_pool, slots)
            else:
                q = apply_rope(q, rope)
                store(k_pool, slots, apply_rope(k, rope))
                store(v_pool, slots, v)
            return self._attention(q, k_pool, v_pool, layout, self._scale)

        return attend


def _attention(name: str, head: Head) -> Attention:
    """The backend of that name; auto on CPU: the C kernel, which reads keys where they lie, wherever it can be used."""
    fits = head.device.type == "cpu" and head.dtype in cpu.COMPUTED and head.config.block.head_dim % WIDTH_UNIT == 0
    library = cpu_kernels() if name == "auto" and fits else None
    if library is not None:
        return partial(cpu.attention, library=library)
    return attention_backend(name, head.device, flag=DRAFT_ATTENTION)
