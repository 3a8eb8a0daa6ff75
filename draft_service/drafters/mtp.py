"""Multi-layer MTP (MiMo-V2, Step-3.5; SGLang's --enable-multi-layer-eagle): a layer for each step of a chain.

All stages read the target's states and none reads a head's: stage i's row p pairs the state of position p with the
token i + 1 places on, committed or, at the end, drafted by the stages before it. Rows whose token was only drafted are
run again when it is known, so states are kept for as many rows as there are stages. Each stage has keys and values of
its own in the same slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from draft_service.drafters.base import NO_DRAFT, AheadRequest, Draft, DraftRequest
from draft_service.drafters.eagle import HeadDrafter, HeadState
from draft_service.drafters.features import FeatureBuffer
from draft_service.drafters.growing import Check
from draft_service.drafters.kv import CacheRows, NoRoom
from draft_service.drafters.models import Tips
from draft_service.drafters.paths import Start
from draft_service.drafters.session_drafter import MAX_ROWS_PER_CALL
from draft_service.session import Extension, Grown, Session
from engine.batch import Segment
from outrider.v1 import verify_pb2
from outrider.wire import Ids


@dataclass(eq=False, slots=True)
class StagedState(HeadState):
    """built[i]: rows that stage i has run on committed tokens; drafted, chances: the chain, when it is up to date."""

    built: list[int]
    drafted: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)


class MultiLayerDrafter(HeadDrafter[StagedState]):
    """Drafts chains, a token from each stage."""

    @property
    def max_steps(self) -> int | None:
        """See Shaped: a layer for each."""
        return self._head.num_stages

    def _new_state(self, session: Session, rows: CacheRows) -> StagedState:
        built = [0] * self._head.num_stages
        return StagedState(session, rows, FeatureBuffer(self._head.feature_width), built)

    def _note(self, news: Sequence[tuple[StagedState, Extension]]) -> None:
        super()._note(news)
        for state, _ in news:
            state.drafted, state.chances = [], []

    def _catch_up(self, states: Sequence[StagedState]) -> None:
        left = min(MAX_ROWS_PER_CALL, self.model.max_batch_tokens)
        pieces: list[tuple[StagedState, int]] = []
        for state in states:
            end = self._num_runnable(state)
            if end == state.rows.num_rows or state.session not in self._served:
                continue
            end = min(end, min(state.built) + left)
            if end <= state.rows.num_rows or not self._grow_to(state, end):
                continue
            left -= end - min(state.built)
            pieces.append((state, end))
        if not pieces:
            return
        for stage in range(self._head.num_stages):
            self._run_stage(stage, pieces)
        for state, _ in pieces:
            state.features.drop(min(state.built))

    def _grow_to(self, state: StagedState, num_rows: int) -> bool:
        try:
            self.model.cache.append(state.rows, num_rows - state.rows.num_rows)
        except NoRoom as error:
            self._served.give_up(state.session, verify_pb2.RELEASE_REASON_CAPACITY, str(error))
            return False
        return True

    def _run_stage(self, stage: int, pieces: Sequence[tuple[StagedState, int]]) -> None:
        """Runs the rows that a stage has not run on committed tokens; of whole sessions also those on drafted ones."""
        segments: list[Segment] = []
        features: list[torch.Tensor] = []
        whole: list[StagedState] = []
        for state, end in pieces:
            is_whole = end == self._num_committed(state)
            num_known = min(end, self._num_committed(state) - stage)
            first, stop = state.built[stage], end if is_whole else num_known
            state.built[stage] = max(first, num_known)
            if first >= stop:
                continue
            slots = self.model.cache.slot_table[state.rows.table_row, first:stop].copy()
            words = self._words(state, stage, first, stop)
            segments.append(Segment(state.rows.table_row, first, words, slots, num_logits=int(is_whole)))
            features.append(state.features.rows(first, stop).rows)
            if is_whole:
                whole.append(state)
        if segments:
            self._note_tips(whole, self.model.run(segments, self.model.fuse(torch.cat(features)), 1, stage))

    def _words(self, state: StagedState, stage: int, first: int, stop: int) -> Ids:
        """Tokens of rows first..stop-1, as far as committed, and then as drafted by the stages before."""
        tokens = state.session.tokens
        committed = tokens[first + 1 + stage : stop + 1 + stage]
        later = max(0, first + 1 + stage - len(tokens))  # drafts before those rows': of prompts shorter than stages
        drafted = np.array(state.drafted, np.int32)[later : later + stop - first - len(committed)]
        return np.concatenate([committed, drafted], dtype=np.int32)

    def _note_tips(self, whole: Sequence[StagedState], tips: Tips) -> None:
        tokens, chances = tips.tokens[:, 0].tolist(), tips.probabilities[:, 0].tolist()
        for state, token, chance in zip(whole, tokens, chances, strict=True):
            state.drafted.append(token)
            state.chances.append(chance)

    def _trees(
        self, requests: Sequence[DraftRequest], starts: Sequence[Start | None], check: Check | None = None
    ) -> list[Draft]:
        grown = Grown(1, self._grower.shape.num_steps)  # together, whatever each takes of it
        return [self._chain(request, grown) for request in requests]

    def _chain(self, request: DraftRequest, grown: Grown) -> Draft:
        session = request.session
        state = self._served.get(session)
        wanted = min(session.wishes.num_steps or self._grower.shape.num_steps, session.max_depth(), request.num_nodes)
        if state is None or wanted < 1:
            return NO_DRAFT
        tokens = np.array(state.drafted[:wanted], np.int32)
        parents = np.arange(-1, len(tokens) - 1, dtype=np.int32)
        chances = np.cumprod(state.chances[:wanted], dtype=np.float64)
        return Draft(tokens, parents, chances, grown=grown)

    def _trees_ahead(self, requests: Sequence[AheadRequest]) -> list[list[Draft]]:
        """None: every stage reads the target's states, and those of tokens not yet verified do not exist."""
        states = [self._served.get(request.verifying.session) for request in requests]
        self._catch_up([state for state in states if state is not None])
        return [[] for _ in requests]
