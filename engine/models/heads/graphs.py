"""CUDA graphs of a draft head's steps: chains, trees as they grow, and the rows that a verdict brings (draft-extend).

As engine.graphs has them for a decoder, with states beside the rows. Stages of a multi-layer head have graphs each.
"""

from __future__ import annotations

from functools import partial

import torch

from engine.batch import Batch
from engine.execution import GraphSizes
from engine.graphs import Capturing, StepGraphs
from engine.models.heads.base import Head
from engine.models.heads.step import NUM_TOP, HeadStep, RunRows
from engine.models.llama import StepRows
from kernels.attention.layout import AttentionLayout
from kernels.likeliest import likeliest


class GraphedHead:
    """A head's steps as graphs; `run` computes a step whose rows are in place on the device."""

    def __init__(self, head: Head, run: RunRows, sizes: GraphSizes, capturing: Capturing) -> None:
        self._run = run
        self._stages = [
            StepGraphs(partial(self._step, stage), sizes, capturing, max_len=head.max_len, device=head.device)
            for stage in range(head.num_stages)
        ]
        num_rows, num_logits = self._stages[0].num_rows, self._stages[0].num_logits
        hidden = head.config.block.hidden_size
        self._states = torch.zeros((num_rows, hidden), dtype=head.dtype, device=head.device)
        self._logits = torch.zeros((num_logits, head.num_drafted), device=head.device)
        self._carried = torch.zeros((num_logits, hidden), dtype=head.dtype, device=head.device)
        num_top = min(max(NUM_TOP, sizes.last_logits), head.num_drafted)
        self._chances = torch.zeros((num_logits, num_top), device=head.device)
        self._likeliest = torch.zeros((num_logits, num_top), dtype=torch.int64, device=head.device)

    def capture(self) -> None:
        """Captures all stages' graphs."""
        for graphs in self._stages:
            graphs.capture()

    def forward(self, batch: Batch, states: torch.Tensor, stage: int) -> HeadStep | None:
        """A step replayed on states [rows, hidden], its logits good until the next; None where no graph holds it."""
        graph = self._stages[stage].find(batch)
        if graph is None:
            return None
        self._states[: len(states)].copy_(states)
        self._stages[stage].replay(graph, batch)
        count = len(batch.logit_rows)
        # Sessions keep what they carry on, and what is likeliest; logits are read at once.
        top = self._chances[:count].clone(), self._likeliest[:count].clone()
        return HeadStep(self._logits[:count], self._carried[:count].clone(), top)

    def _step(self, stage: int, rows: StepRows, layout: AttentionLayout) -> None:
        step = self._run(rows, self._states[: len(rows.tokens)], layout, stage)
        count = len(step.logits)
        self._logits[:count].copy_(step.logits)
        self._carried[:count].copy_(step.carried)
        if count:  # within the graph: launched one by one, what finds them holds the host up
            chances, ids = likeliest(step.logits, self._chances.shape[1])
            self._chances[:count].copy_(chances)
            self._likeliest[:count].copy_(ids)
