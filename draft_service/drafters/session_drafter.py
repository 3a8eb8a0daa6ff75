"""A model's drafts for sessions: rows over a cache, catching up with what was committed, trees for many at once.

A session's rows are those that its model has run on committed tokens; drafting adds none that stay. Whoever cannot be
served (no room, unusable rows) is given up alone and named in `take_given_up`; the others go on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic

import torch

from draft_service.drafters.ahead import trees_ahead
from draft_service.drafters.base import NO_DRAFT, AheadRequest, Draft, DraftRequest, GivenUp
from draft_service.drafters.features import Piece, joined
from draft_service.drafters.growing import Check
from draft_service.drafters.kv import CacheRows, NoRoom
from draft_service.drafters.models import DraftModel, Tip
from draft_service.drafters.paths import Behind, Start
from draft_service.drafters.roster import Roster, StateT
from draft_service.drafters.shape import TreeShape
from draft_service.drafters.trees import TreeGrower, Wanted
from draft_service.session import Extension, Session, Wishes
from engine.batch import Segment
from engine.devices import DeviceLock
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import Ids

# Rows run in one call beyond which a session's backlog waits for the next: a long prompt must not hold the others up.
MAX_ROWS_PER_CALL = 1024
# Rows of committed tokens that are run together with a path that is likely to be accepted.
MAX_ROWS_BESIDE = 32


class SessionDrafter(ABC, Generic[StateT]):
    """Implements base.Drafter for sessions, but for which rows there are and what they hold (see ModelDrafter)."""

    inline = False
    corpora = None

    def __init__(
        self, model: DraftModel, shape: TreeShape, *, algorithm: common_pb2.Algorithm, draft_model: str,
        features: common_pb2.FeatureLayout | None = None, target: common_pb2.ModelInfo | None = None,
    ) -> None:  # fmt: skip
        self.algorithm = algorithm
        self.draft_model = draft_model
        self.num_draft_tokens = shape.num_draft_tokens
        self.features = features or common_pb2.FeatureLayout(kind=common_pb2.FEATURE_KIND_NONE)
        self.target = target or common_pb2.ModelInfo()
        """The model that it was made for, for Enlist: sizes and vocabulary, as far as known."""
        self.model = model
        self._grower = TreeGrower(model, shape)
        self._served = Roster[StateT](model)
        self._lock = DeviceLock(model.device)

    @property
    def shape(self) -> TreeShape:
        """The shape of trees for requests that wish nothing."""
        return self._grower.shape

    @property
    def max_steps(self) -> int | None:
        """See Shaped: the model goes on from its own states or tokens."""
        return None

    def reshape(self, shape: TreeShape, least_reach: float = 0.0) -> None:
        """Has trees of another shape grown from the next call on, as deep as pays (growing.py); any thread may ask.

        A head with a layer for each step always runs all.
        """
        self._grower.shape, self._grower.least_reach = shape, least_reach
        self.num_draft_tokens = shape.num_draft_tokens

    # ---- base.Drafter

    def open(self, sessions: Sequence[Session]) -> None:
        """Takes sessions on and runs what can be run of them."""
        with self._lock, torch.inference_mode():
            states = [
                state for session in sessions if (state := self._served.admit(session, self._new_state)) is not None
            ]
            self._catch_up(states)

    def add_features(self, rows: Sequence[tuple[Session, common_pb2.FeatureRows]]) -> None:
        """Needs none; a verify service that sends them all the same is not at fault."""

    def extend(self, extensions: Sequence[Extension]) -> None:
        """Notes what was committed; it is run when a tree is asked for."""
        with self._lock:
            self._note(
                [
                    (state, extension)
                    for extension in extensions
                    if (state := self._served.get(extension.session)) is not None
                    and self._served.can_read(state, extension.base_len)
                ]
            )

    def close(self, sessions: Sequence[Session]) -> None:
        """Forgets sessions and frees their pages; of one that was given up, nothing is left."""
        with self._lock, torch.inference_mode():
            for session in sessions:
                self._served.forget(session)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """A tree for each; none for a session that is not caught up, or has no room left."""
        with self._lock:
            starts = self._starts(requests)
            if None in starts:
                late = [request.session for request, start in zip(requests, starts, strict=True) if start is None]
                with torch.inference_mode():
                    self._catch_up(list(filter(None, map(self._served.get, late))))
                starts = self._starts(requests)
            return self._trees(requests, starts)

    def draft_ahead(self, requests: Sequence[AheadRequest]) -> list[list[Draft]]:
        """Drafts below the likeliest outcomes of each, with the model's own guess at the bonus."""
        with self._lock, torch.inference_mode():
            return self._trees_ahead(requests)

    def num_nodes(self, wishes: Wishes) -> int:
        """Nodes of a request's trees: as the flags say, where it does not; a chain has a node for each step."""
        if wishes.num_draft_tokens is not None:
            return wishes.num_draft_tokens - 1
        if wishes.num_steps is not None and (wishes.topk or self._grower.shape.topk) == 1:
            return wishes.num_steps
        return self.num_draft_tokens - 1

    def is_brief(self, sessions: Sequence[Session]) -> bool:
        """See base.Drafter: whether what was committed last is all that was not run yet."""
        states = filter(None, map(self._served.get, sessions))
        behind = [self._num_committed(state) - state.rows.num_rows for state in states]
        return max(behind, default=0) <= MAX_ROWS_BESIDE and not self._lock.locked()

    def close_down(self) -> None:
        """Frees what it holds; no call follows."""
        self._served.clear()

    def take_given_up(self) -> list[GivenUp]:
        """Sessions given up since the last call."""
        return self._served.take_given_up()

    # ---- what a kind of model says

    @abstractmethod
    def _new_state(self, session: Session, rows: CacheRows) -> StateT:
        """The state of a session none of whose rows were run."""

    @abstractmethod
    def _num_runnable(self, state: StateT) -> int:
        """Rows for which everything is known."""

    @abstractmethod
    def _num_committed(self, state: StateT) -> int:
        """Rows of all committed tokens; with these run, a tree can be grown."""

    @abstractmethod
    def _tokens(self, session: Session, first: int, end: int) -> Ids:
        """Tokens of rows first..end-1, int32."""

    @abstractmethod
    def _input(self, state: StateT, first: int, end: int) -> Piece | None:
        """The target's rows first..end-1; they are not asked for again."""

    # ---- sessions

    def _note(self, news: Sequence[tuple[StateT, Extension]]) -> None:
        """Takes in what was committed."""
        for state, _ in news:
            state.tip = None

    # ---- catching up

    def _catch_up(self, states: Sequence[StateT]) -> None:
        """Runs rows of committed tokens up to MAX_ROWS_PER_CALL, short backlogs first where not all fit."""
        left = MAX_ROWS_PER_CALL
        while left > 0:
            behind = [(count, s) for s in states if (count := self._num_runnable(s) - s.rows.num_rows) > 0]
            behind = [(count, s) for count, s in behind if s.session in self._served]
            missing = sum(count for count, _ in behind)
            if missing > left:
                behind.sort(key=lambda one: one[0])
            left -= (done := self._run_rows([s for _, s in behind], min(left, self.model.max_batch_tokens)))
            if done == missing:
                return

    def _run_rows(self, states: Sequence[StateT], most: int) -> int:
        """One forward of at most `most` rows; returns how many they were."""
        pieces: list[tuple[StateT, int, int]] = []
        segments: list[Segment] = []
        for state in states:
            first = state.rows.num_rows
            end = min(self._num_runnable(state), first + most)
            if end == first:
                break
            try:
                slots = self.model.cache.append(state.rows, end - first)
            except NoRoom as error:
                self._served.give_up(state.session, verify_pb2.RELEASE_REASON_CAPACITY, str(error))
                continue
            wanted = int(end == self._num_committed(state))
            words = self._tokens(state.session, first, end)
            segments.append(Segment(state.rows.table_row, first, words, slots, num_logits=wanted))
            pieces.append((state, first, end))
            most -= end - first
        if not pieces:
            return 0
        features = [own for piece in pieces if (own := self._input(*piece)) is not None]
        states_of_rows = self.model.fuse(joined(features).rows) if features else None
        tips = self.model.run(segments, states_of_rows, self._grower.num_top)
        whole = [state for state, _, end in pieces if end == self._num_committed(state)]
        for index, state in enumerate(whole):
            state.tip = Tip(tips, index)
        return sum(end - first for _, first, end in pieces)

    # ---- trees

    def _trees(
        self, requests: Sequence[DraftRequest], starts: Sequence[Start | None], check: Check | None = None
    ) -> list[Draft]:
        drafts = [NO_DRAFT] * len(requests)
        wanted: dict[int, Wanted] = {}
        most = 0  # slots of one of them
        for index, (request, start) in enumerate(zip(requests, starts, strict=True)):
            if start is None:
                continue
            session = request.session
            tree = self._grower.plan(start, session.wishes, max_depth=session.max_depth(), num_nodes=request.num_nodes)
            if tree is None:
                continue
            slots, behind = max(most, tree.slots), start.num_behind
            if self._has_room(session, slots + behind):
                most, wanted[index] = slots, tree
                if behind:
                    self.model.cache.append(start.rows, behind)
        for index, draft in zip(wanted, self._grower.grow(list(wanted.values()), check), strict=True):
            drafts[index] = draft
        return drafts

    def _has_room(self, session: Session, slots: int) -> bool:
        """Whether the pool can hold a tree while it grows; if not, the session makes room for the others.

        slots: of the rows that it is behind with, and of its tree or another's, which must fit as well beside them.
        """
        if slots <= self.model.cache.num_free:
            return True
        detail = f"{slots} slots for a tree, {self.model.cache.num_free} free in the drafter's pool"
        self._served.give_up(session, verify_pb2.RELEASE_REASON_CAPACITY, detail)
        return False

    def _trees_ahead(self, requests: Sequence[AheadRequest]) -> list[list[Draft]]:
        states = [self._served.get(request.verifying.session) for request in requests]
        self._catch_up([state for state in states if state is not None and self._near_end(state) is None])
        starts = [self._start(request.verifying.session, self.model.cache.max_len) for request in requests]
        return trees_ahead(self._grower, requests, starts)

    def _near_end(self, state: StateT) -> int | None:
        """Rows of all committed tokens, where those not run are so few that they go with the tree's likeliest path."""
        end = self._num_committed(state)
        is_near = 0 < end - state.rows.num_rows <= MAX_ROWS_BESIDE and self._num_runnable(state) == end
        return end if is_near else None

    def _starts(self, requests: Sequence[DraftRequest]) -> list[Start | None]:
        """Where sessions stand; None where one neither is caught up nor will be in the call that grows its tree."""
        most_rows = 0 if self.model.grower is None else self.model.cache.max_len
        return [self._start(request.session, most_rows) for request in requests]

    def _start(self, session: Session, most_rows: int) -> Start | None:
        """Where a session stands that is caught up, or near that with no more than `most_rows`; else None."""
        state = self._served.get(session)
        if state is None:
            return None
        if state.tip is not None:
            return Start(state.rows, state.tip)
        first, end = state.rows.num_rows, self._near_end(state)
        if end is None or end > most_rows:
            return None

        def done(tip: Tip) -> None:
            state.tip = tip

        words = self._tokens(session, first, end)
        return Start(state.rows, None, Behind(words, lambda: self._input(state, first, end), done))
