"""EAGLE, EAGLE-3 and one-layer MTP: a head drafts from the target's own hidden states.

Row i pairs token i + 1 with the target's state of position i, so C committed tokens make C - 1 rows, and a session is
drafted for only when all their states have come. After a verdict, the rows that it brings are run on the target's
states; what the head guessed in their place while drafting was on rows that are gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from draft_service.drafters.base import TextRequest
from draft_service.drafters.features import (
    FeatureBuffer,
    Piece,
    UnusableFeatures,
    read_tensor,
    read_together,
)
from draft_service.drafters.features import warm_up as warm_up_reading
from draft_service.drafters.kv import CacheRows
from draft_service.drafters.model_drafter import ModelDrafter
from draft_service.drafters.models import HeadModel
from draft_service.drafters.roster import State
from draft_service.drafters.shape import TreeShape
from draft_service.session import Extension, Session
from outrider.errors import InvalidArgument
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import Ids


@dataclass(eq=False, slots=True)
class HeadState(State):
    """A session's state with the target's rows that were not run yet."""

    features: FeatureBuffer


HeadStateT = TypeVar("HeadStateT", bound=HeadState)


class HeadDrafter(ModelDrafter[HeadStateT]):
    """What heads share: the target's rows, taken in as they come, and one row fewer than tokens."""

    def __init__(
        self, model: HeadModel, shape: TreeShape, *, algorithm: common_pb2.Algorithm, draft_model: str,
        features: common_pb2.FeatureLayout, target: common_pb2.ModelInfo,
    ) -> None:  # fmt: skip
        super().__init__(model, shape, algorithm=algorithm, draft_model=draft_model, features=features, target=target)
        self._head = model

    def warm_up(self) -> None:
        """See ModelDrafter; what reads rows too."""
        warm_up_reading()
        super().warm_up()

    def add_features(self, rows: Sequence[tuple[Session, common_pb2.FeatureRows]]) -> None:
        """Takes rows and runs what they make runnable, so that a prompt is read while the target reads it.

        Rows that are not inline are waited for: they are to be fetched, and given here.
        """
        with self._lock, torch.inference_mode():
            states = self._take(
                [(state, found) for session, found in rows if (state := self._served.get(session)) is not None]
            )
            self._catch_up(list(dict.fromkeys(states)))

    def _rows_of(self, request: TextRequest) -> torch.Tensor:
        """The target's rows [len(tokens) - 1, width] that came with a text."""
        if len(request.tokens) < 2:
            name = common_pb2.Algorithm.Name(self.algorithm)
            raise InvalidArgument(f"tokens has 1 token; {name} drafts from 2 or more", field="tokens")
        if request.features is None:
            raise InvalidArgument(
                f"features: {common_pb2.Algorithm.Name(self.algorithm)} drafts from the target's hidden states of all "
                "tokens but the last",
                field="features",
            )
        try:
            rows = read_tensor(request.features, self._head.feature_width)
        except UnusableFeatures as error:
            raise InvalidArgument(f"features: {error}", field="features") from error
        if len(rows) != len(request.tokens) - 1:
            raise InvalidArgument(
                f"features: {len(rows)} rows for {len(request.tokens)} tokens; all but the last need one",
                field="features",
            )
        return rows

    def _note(self, news: Sequence[tuple[HeadStateT, Extension]]) -> None:
        super()._note(news)
        self._take([(state, found.verdict.features) for state, found in news if found.verdict.HasField("features")])

    def _take(self, found: Sequence[tuple[HeadStateT, common_pb2.FeatureRows]]) -> list[HeadStateT]:
        """The states whose rows could be used; the sessions of the others are given up."""
        pieces = read_together([(state.session.ring, rows) for state, rows in found], self._head.feature_width)
        if pieces is not None:
            for (state, rows), piece in zip(found, pieces, strict=True):
                state.features.put(rows.first_pos, piece)
            return [state for state, _ in found]
        taken: list[HeadStateT] = []
        for state, rows in found:
            try:
                state.features.add(rows, state.session.ring)
            except UnusableFeatures as error:
                self._served.give_up(state.session, verify_pb2.RELEASE_REASON_FEATURES, str(error))
            else:
                taken.append(state)
        return taken

    def _take_rows(self, state: HeadStateT, features: torch.Tensor) -> None:
        state.features.put(0, Piece(features, 0, len(features)))

    def _blank_rows(self, count: int) -> torch.Tensor | None:
        return torch.zeros(count, self._head.feature_width)

    def _num_runnable(self, state: HeadStateT) -> int:
        return min(state.features.end, len(state.session.tokens) - 1)

    def _num_committed(self, state: HeadStateT) -> int:
        return len(state.session.tokens) - 1

    def _tokens(self, session: Session, first: int, end: int) -> Ids:
        return session.tokens[first + 1 : end + 1]

    def _input(self, state: HeadStateT, first: int, end: int) -> Piece | None:
        found = state.features.rows(first, end)
        state.features.drop(end)
        return found


class EagleDrafter(HeadDrafter[HeadState]):
    """A head that goes on from its own states: any but multi-layer ones."""

    def _new_state(self, session: Session, rows: CacheRows) -> HeadState:
        return HeadState(session, rows, FeatureBuffer(self._head.feature_width))
