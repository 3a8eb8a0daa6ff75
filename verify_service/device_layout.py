"""How a step's work lies for a device that draws: what each session needs for it, and all their trees in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.sampling import Filters
from kernels.transfer import to_device
from outrider.tree import TokenTree
from verify_service.session_sampler import RowPlan
from verify_service.work import Work

_EMPTY = TokenTree.empty()
_GREEDY = Filters(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A session that draws in this step."""

    index: int
    work: Work
    tree: TokenTree
    rows: NDArray[np.int64]
    """[n + 1]: of the step's logits."""
    plan: RowPlan


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """A chunk of a prompt whose tokens' log-probabilities are wanted."""

    work: Work
    first: int
    tokens: NDArray[np.int32]
    """The prompt's tokens that follow the rows from `first` on."""


def lay_out(works: Sequence[Work]) -> tuple[list[Drawn], list[PromptChunk]]:
    """The sessions that draw in a step, and the prompts that are scored; logits' rows are in the order of `works`."""
    drawn: list[Drawn] = []
    prompts: list[PromptChunk] = []
    first = 0
    for index, work in enumerate(works):
        session, end = work.session, first + work.num_logits
        if session.wants_prompt_rows:
            prompts.append(PromptChunk(work, first, session.prompt_after(work.num_logits)))
        if work.samples:
            tree = work.match.tree if work.match is not None else _EMPTY
            plan = session.sampler.plan(tree, session.output_len)
            drawn.append(Drawn(index, work, tree, np.arange(end - len(tree) - 1, end), plan))
        first = end
    return drawn, prompts


class TreeBatch:
    """B sessions' trees of at most n nodes, padded, on the device."""

    def __init__(self, drawn: list[Drawn], device: torch.device) -> None:
        width = padded_width(max(len(each.tree) for each in drawn))
        self.drawn = drawn
        self.biased = [index for index, each in enumerate(drawn) if each.plan.thresholds is not None]
        counts = np.array([len(each.tree) for each in drawn])
        starts = np.cumsum(counts + 1) - (counts + 1)
        parents, tokens = (np.zeros((len(drawn), width), np.int64) for _ in range(2))
        for index, each in enumerate(drawn):
            parents[index, : counts[index]], tokens[index, : counts[index]] = each.tree.parents, each.tree.tokens
        flat_of = starts[:, None] + np.minimum(np.arange(width + 1), counts[:, None])
        flat_rows = np.concatenate([each.rows for each in drawn])
        # Those with thresholds draw from distributions instead; greedy costs least.
        self.draw_filters = [
            _GREEDY if each.plan.thresholds is not None else each.plan.filters for each in drawn for _ in each.rows
        ]
        u = np.concatenate([each.plan.coins for each in drawn])
        sent = (parents, tokens, counts, flat_rows, flat_of, flat_rows[flat_of], u)
        there = [to_device(np.ascontiguousarray(array), device) for array in sent]
        self.parents, self.tokens, self.num_nodes, self.flat_rows, self.flat_of, self.rows, self.draw_u = there


def padded_width(num_nodes: int) -> int:
    """The next power of two: kernels are compiled for the width of a batch, and there should be few of them."""
    return 1 << (num_nodes - 1).bit_length() if num_nodes else 0
