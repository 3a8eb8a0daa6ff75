"""One session's rule, from logits to what it commits: draws along its tree, and walks down while drafts agree.

Rows that the walk does not visit are never shaped or sampled. Draws are keyed by (seed, choice, output position), so
the outcome does not depend on the tree, the batch or earlier failures. This is the host's way, and what the device's
(device_sampler.py) is held to, which gets what it needs by `plan`. Nothing here knows of sessions and steps.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.acceptance import Accepted, accept_thresholds, walk
from kernels.penalties import History, Penalties, RowEdits, penalise, row_edits
from kernels.philox import COIN_LANE, FINAL_LANE, uniform_one
from kernels.sampling import NO_TOKEN, Filters, draw, filtered_row
from outrider.sampling import SamplingParams
from outrider.tree import TokenTree
from outrider.v1 import verify_pb2
from outrider.wire import Ids
from verify_service.grammar import GrammarState
from verify_service.logprobs import token_logprob


@dataclass(frozen=True, slots=True)
class RowPlan:
    """What a device needs to draw along one session's tree of n nodes; rows hold the root first."""

    filters: Filters
    coins: list[float]
    """[n + 1]: of each row; with thresholds, of each depth."""
    finals: list[float]
    """[n + 1], of each depth, with thresholds; else empty."""
    thresholds: tuple[float, float] | None
    """single and acc; None: coupled."""
    edits: list[RowEdits]
    """The edits of each row's logits; empty where nothing is penalised."""
    masks: NDArray[np.int32] | None
    """[n + 1, ceil(V / 32)]: bits of the tokens that a grammar allows."""


class SessionSampler:
    """How one session's logits become tokens."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        choice_index: int,
        stop_ids: frozenset[int],
        prompt: Ids,
        resumed: Ids,
        threshold_single: float = 1.0,
        threshold_acc: float = 1.0,
        grammar: GrammarState | None = None,
    ) -> None:
        self._filters = Filters(params.temperature, params.top_k, params.top_p, params.min_p)
        self._seed = seed
        self._choice = choice_index
        self._thresholds = threshold_single, threshold_acc
        self._coupled = self._filters.is_greedy or (threshold_single >= 1.0 and threshold_acc >= 1.0)
        self._penalties = Penalties.build(
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            repetition=params.repetition_penalty,
            logit_bias=params.logit_bias,
            min_tokens=params.min_tokens,
            stop_ids=stop_ids,
        )
        self._grammar = grammar
        self._penalised = not self._penalties.changes_nothing
        self._history = History(prompt.tolist() if self._penalties.uses_history else [])
        self._is_shaped = self._penalised or grammar is not None
        # Whether `accept` looks at nothing but each row's highest logit.
        self.takes_highest = self._filters.is_greedy and not self._is_shaped
        self.commit(resumed.tolist())

    def for_choice(self, choice_index: int, grammar: GrammarState | None) -> SessionSampler:
        """A sampler for another choice of the same request, before either has an output of its own."""
        other = copy.copy(self)
        other._choice, other._grammar, other._history = choice_index, grammar, self._history.copy()
        return other

    def be_greedy(self) -> None:
        """Takes the likeliest token from now on, whatever the request's temperature."""
        self._filters, self._coupled, self.takes_highest = Filters(temperature=0.0), True, not self._is_shaped

    def commit(self, tokens: list[int]) -> None:
        """Takes in output tokens."""
        if self._penalised:
            self._history.commit(tokens)

    def accept(
        self, logits: NDArray[np.float32], tree: TokenTree, output_pos: int, likeliest: list[int] | None = None
    ) -> Accepted:
        """The accepted path and the bonus; logits [n + 1, V], root first; output_pos: of the token after the root.

        likeliest: each row's highest logit, NO_TOKEN where there is none, where that is known.
        """
        if self.takes_highest:
            if likeliest is not None:
                return walk(tree.links, likeliest.__getitem__)
            return walk(tree.links, lambda row: _likeliest(logits[row]))
        if self._coupled:
            depths = [0, *tree.depths.tolist()]

            def target_token(row: int) -> int:
                u = 0.0 if self._filters.is_greedy else self._uniform(output_pos + depths[row], COIN_LANE)
                return draw(self._shaped(logits, tree, row), self._filters, u)

            return walk(tree.links, target_token)
        single, acc = self._thresholds
        return accept_thresholds(
            tree.parents.tolist(),
            tree.tokens.tolist(),
            lambda row: filtered_row(self._shaped(logits, tree, row), self._filters),
            lambda depth: self._uniform(output_pos + depth, COIN_LANE),
            lambda depth: self._uniform(output_pos + depth, FINAL_LANE),
            threshold_single=single,
            threshold_acc=acc,
        )

    def plan(self, tree: TokenTree, output_pos: int) -> RowPlan:
        """What a device that has the logits needs for the walk that `accept` does."""
        depths, count = [0, *tree.depths.tolist()], len(tree) + 1
        paths = [tree.tokens[tree.path(row - 1)].tolist() for row in range(count)] if self._is_shaped else []
        coins, finals = [0.0] * count, []
        if not self._coupled:
            finals = [self._uniform(output_pos + depth, FINAL_LANE) for depth in range(count)]
            coins = [self._uniform(output_pos + depth, COIN_LANE) for depth in range(count)]
        elif not self._filters.is_greedy:
            coins = [self._uniform(output_pos + depth, COIN_LANE) for depth in depths]
        return RowPlan(
            self._filters,
            coins,
            finals,
            None if self._coupled else self._thresholds,
            [row_edits(self._penalties, self._history, path) for path in paths] if self._penalised else [],
            None if self._grammar is None else np.stack([self._grammar.mask_words(path) for path in paths]),
        )

    def node_probabilities(self, logits: NDArray[np.float32], tree: TokenTree) -> list[float]:
        """The target's probability of each node's token given its path, unshaped; logits [n + 1, V]."""
        rows = logits[tree.parents + 1].astype(np.float64)
        rows -= rows.max(axis=1, keepdims=True)
        chosen = rows[np.arange(len(tree)), tree.tokens]
        return (np.exp(chosen) / np.exp(rows).sum(axis=1)).tolist()

    def path_logprobs(
        self, logits: NDArray[np.float32], tree: TokenTree, outcome: Accepted, num_top: int
    ) -> list[verify_pb2.TokenLogprob]:
        """Log-probabilities of each accepted token and the bonus, in order; logits [n + 1, V], root first."""
        tokens = [*tree.tokens[outcome.nodes].tolist(), outcome.bonus]
        rows = [0, *(node + 1 for node in outcome.nodes)]
        return [
            token_logprob(self._shaped(logits, tree, row), token, num_top)
            for row, token in zip(rows, tokens, strict=True)
        ]

    def _shaped(self, logits: NDArray[np.float32], tree: TokenTree, row: int) -> NDArray[np.float32]:
        """The logits float32 [V] of a row after penalties and grammar along its own path."""
        if not self._is_shaped:
            return logits[row]
        values = logits[row].copy()
        path = tree.tokens[tree.path(row - 1)].tolist()
        if self._penalised:
            penalise(values, self._penalties, self._history, path)
        if self._grammar is not None:
            self._grammar.forbid(values, path)
        return values

    def _uniform(self, position: int, lane: int) -> float:
        return uniform_one(self._seed, self._choice, position, lane)


def _likeliest(row: NDArray[np.float32]) -> int:
    """The likeliest token, or NO_TOKEN where its logit is not finite: what `draw` gives when it is greedy."""
    best = int(row.argmax())
    return best if math.isfinite(row[best]) else NO_TOKEN
