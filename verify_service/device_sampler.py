"""A step's draws where the logits are: shaped, drawn, walked and scored on the device, and read back in one copy.

What the host knows (filters, random numbers, penalties, grammars, trees) goes up without waiting; what comes down are
accepted nodes, bonus tokens and the log-probabilities that requests ask for. Tokens are those of SessionSampler.accept.
All rows of a tree are drawn, where the host would draw only those that it visits: that takes no more steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kernels import acceptance, sampling_torch
from kernels.acceptance import Accepted, AcceptedBatch, settled
from kernels.dispatch import has_triton
from kernels.logprobs import token_logprobs
from kernels.sampling import Filters
from kernels.sampling_torch import RowFilters, filtered_probs_rows
from kernels.shaping import apply_bitmasks, apply_edits
from kernels.transfer import Readback, to_device
from outrider.v1 import verify_pb2
from verify_service.device_layout import Drawn, PromptChunk, TreeBatch, lay_out, padded_width
from verify_service.work import Work

_BIASED_ROWS = 128  # of float64 over the vocabulary, several times over: 131 MB each of Llama 3's


class Kernels(NamedTuple):
    """Functions with the signatures of the torch references."""

    draw_rows: Callable[..., torch.Tensor]
    accept_coupled: Callable[..., AcceptedBatch]
    accept_thresholds: Callable[..., AcceptedBatch]


TORCH = Kernels(sampling_torch.draw_rows, acceptance.accept_coupled_batch, acceptance.accept_thresholds_batch)


def kernels_for(device: torch.device) -> Kernels:
    """Triton's where they serve, else torch's."""
    if not has_triton(device):
        return TORCH
    from kernels import acceptance_triton, sampling_triton

    return Kernels(
        sampling_triton.draw_rows, acceptance_triton.accept_coupled_batch, acceptance_triton.accept_thresholds_batch
    )


class DeviceSampler:
    """Draws for a whole step on the device; has the interface of verify_service.sampler.Sampler."""

    def __init__(self, device: torch.device, kernels: Kernels | None = None) -> None:
        self._device = device
        self._kernels = kernels or kernels_for(device)

    @torch.inference_mode()
    def warm_up(self, vocab_size: int, max_nodes: int) -> None:
        """Compiles what trees of up to `max_nodes` need, so that no step has to wait for it."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        filters = RowFilters.of([Filters(top_k=2, top_p=0.5)], self._device)
        logits, one = zeros(1, vocab_size, dtype=torch.float32), zeros(1, dtype=torch.float64)
        self._kernels.draw_rows(logits, zeros(1), filters, one)
        for width in sorted({padded_width(count) for count in range(max_nodes + 1)}):
            tree = (zeros(1, width), zeros(1, width), zeros(1))
            self._kernels.accept_coupled(*tree, zeros(1, width + 1))
            probs, u = (zeros(1, width + 1, size, dtype=torch.float64) for size in (vocab_size, 1))
            self._kernels.accept_thresholds(*tree, probs, u[:, :, 0], u[:, :, 0], one, one)

    @torch.inference_mode()
    def accept(self, works: Sequence[Work], logits: torch.Tensor) -> list[Accepted | None]:
        """Does what Sampler.accept does; logits [L, V] are shaped in place."""
        drawn, prompts = lay_out(works)
        read = Readback()
        prompt_marks = [self._score_prompt(each, logits, read) for each in prompts]
        batch = TreeBatch(drawn, self._device) if drawn else None
        tree_marks = self._score_nodes(drawn, logits, read)
        mark, score_marks = None, {}
        if batch is not None:
            self._shape(drawn, logits)
            accepted = self._walk(batch, logits)
            mark = read.add_all(accepted)
            score_marks = self._score_paths(batch, accepted, logits, read)
        arrays = read.fetch()
        for each, start in zip(prompts, prompt_marks, strict=True):
            scores = [] if start is None else _token_logprobs(each.tokens.tolist(), arrays, start)
            each.work.session.add_prompt_logprobs(scores)
        outcomes: list[Accepted | None] = [None] * len(works)
        if mark is None:
            return outcomes
        nodes, counts, bonuses = arrays[mark : mark + 3]
        for index, each in enumerate(drawn):
            outcome = settled(Accepted(nodes[index, : counts[index]].tolist(), int(bonuses[index])), each.tree.words)
            outcomes[each.index] = outcome
            if outcome is None:
                continue
            if index in tree_marks:
                each.work.probabilities = np.exp(arrays[tree_marks[index]]).tolist()
            if index in score_marks:
                tokens = [*each.tree.tokens[outcome.nodes].tolist(), outcome.bonus]
                each.work.logprobs = _token_logprobs(tokens, arrays, score_marks[index])
        return outcomes

    def _shape(self, drawn: list[Drawn], logits: torch.Tensor) -> None:
        edited = [each for each in drawn if each.plan.edits]
        if edited:
            rows = np.concatenate([each.rows for each in edited])
            apply_edits(logits, rows, [edit for each in edited for edit in each.plan.edits])
        masks = [(each.rows, each.plan.masks) for each in drawn if each.plan.masks is not None]
        if masks:
            apply_bitmasks(logits, np.concatenate([r for r, _ in masks]), np.concatenate([mask for _, mask in masks]))

    def _walk(self, batch: TreeBatch, logits: torch.Tensor) -> AcceptedBatch:
        """Draws at all rows, and each session's path and bonus."""
        filters = RowFilters.of(batch.draw_filters, self._device)
        tokens = self._kernels.draw_rows(logits, batch.flat_rows, filters, batch.draw_u)
        target = tokens[batch.flat_of]
        accepted = self._kernels.accept_coupled(batch.parents, batch.tokens, batch.num_nodes, target)
        # Those with thresholds walk by them instead, a few at a time: their rows are whole distributions.
        together = max(1, _BIASED_ROWS // (batch.tokens.shape[1] + 1))
        for first in range(0, len(batch.biased), together):
            self._walk_biased(batch, batch.biased[first : first + together], logits, accepted)
        return accepted

    def _walk_biased(
        self, batch: TreeBatch, indices: list[int], logits: torch.Tensor, accepted: AcceptedBatch
    ) -> None:  # fmt: skip
        """Writes what the sessions at these indices accept into `accepted`."""
        plans = [batch.drawn[index].plan for index in indices]
        chosen = self._up(np.array(indices))
        width = batch.tokens.shape[1]
        per_row = RowFilters.of([plan.filters for plan in plans for _ in range(width + 1)], self._device)
        rows = batch.rows[chosen].flatten()
        probs = filtered_probs_rows(logits.index_select(0, rows), per_row).view(len(plans), width + 1, -1)
        coins, finals = (
            self._up(np.array([numbers + [0.0] * (width + 1 - len(numbers)) for numbers in columns]))
            for columns in ([plan.coins for plan in plans], [plan.finals for plan in plans])
        )
        single, acc = (self._up(np.array(column)) for column in zip(*(p.thresholds or () for p in plans), strict=True))
        by_threshold = self._kernels.accept_thresholds(
            batch.parents[chosen], batch.tokens[chosen], batch.num_nodes[chosen], probs, coins, finals, single, acc
        )
        for whole, part in zip(accepted, by_threshold, strict=True):
            whole[chosen] = part

    def _score_nodes(self, drawn: list[Drawn], logits: torch.Tensor, read: Readback) -> dict[int, int]:
        """ln p of each node's token given its path, before anything is shaped, where trees are shown."""
        marks: dict[int, int] = {}
        for index, each in enumerate(drawn):
            if each.work.session.include_trees and len(each.tree):
                rows = self._up(each.rows[each.tree.parents + 1])
                tokens = self._up(each.tree.tokens.astype(np.int64))
                marks[index] = read.add(token_logprobs(logits, rows, tokens, 0).logprobs)
        return marks

    def _score_paths(
        self, batch: TreeBatch, accepted: AcceptedBatch, logits: torch.Tensor, read: Readback
    ) -> dict[int, int]:
        """Log-probabilities along the paths, where requests ask; the first of three arrays for each session."""
        scored = [index for index, each in enumerate(batch.drawn) if each.work.session.logprobs]
        marks: dict[int, int] = {}
        for index in scored:
            nodes = torch.nn.functional.pad(accepted.nodes[index], (0, 1), value=-1)
            is_node = nodes >= 0
            drafted = torch.nn.functional.pad(batch.tokens[index], (0, 1))[nodes.clamp(min=0)]
            tokens = torch.where(is_node, drafted, accepted.bonus[index]).clamp(min=0)
            above = torch.nn.functional.pad(nodes[:-1], (1, 0), value=-1)
            rows = batch.rows[index][above + 1]
            scores = token_logprobs(logits, rows, tokens, batch.drawn[index].work.session.num_top_logprobs)
            marks[index] = read.add_all(scores)
        return marks

    def _score_prompt(self, prompt: PromptChunk, logits: torch.Tensor, read: Readback) -> int | None:
        """Log-probabilities of the prompt's tokens that follow a chunk's rows; the first of three arrays."""
        if not len(prompt.tokens):
            return None
        rows = self._up(np.arange(prompt.first, prompt.first + len(prompt.tokens)))
        tokens = self._up(prompt.tokens.astype(np.int64))
        scores = token_logprobs(logits, rows, tokens, prompt.work.session.num_top_logprobs)
        return read.add_all(scores)

    def _up(self, array: NDArray[np.generic]) -> torch.Tensor:
        return to_device(np.ascontiguousarray(array), self._device)


def _token_logprobs(tokens: list[int], arrays: list[NDArray[np.generic]], mark: int) -> list[verify_pb2.TokenLogprob]:
    return [_token_logprob(token, arrays, mark, place) for place, token in enumerate(tokens)]


def _token_logprob(token: int, arrays: list[NDArray[np.generic]], mark: int, place: int) -> verify_pb2.TokenLogprob:
    logprobs, top_ids, top_logprobs = (array[place] for array in arrays[mark : mark + 3])
    there = not np.isnan(logprobs)  # where the model gave no distribution, nothing is likeliest
    top = zip(top_ids.tolist(), top_logprobs.tolist(), strict=True) if there else ()
    return verify_pb2.TokenLogprob(
        token=token,
        logprob=float(logprobs),
        top=[verify_pb2.TopLogprob(token=best, logprob=logprob) for best, logprob in top],
    )
