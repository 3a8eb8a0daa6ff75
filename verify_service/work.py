"""One session's part of a step: its rows and slots, the tree below them, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.batch import Segment
from outrider.v1 import verify_pb2
from verify_service.assignment import Assignment
from verify_service.proposals import Match
from verify_service.session import Session


@dataclass(slots=True, eq=False)
class Work:
    """One session's part of a step."""

    session: Session
    slots: Sequence[int]  # for the rows, in order
    samples: bool  # whether its last rows' logits are wanted
    decodes: bool = True  # it runs no more than the newest token and drafts
    assignment: Assignment | None = None
    match: Match | None = None
    probabilities: Sequence[float] = ()  # the target's, per node, where trees are shown
    logprobs: Sequence[verify_pb2.TokenLogprob] = ()  # of the path and the bonus, where wanted
    num_rows: int = field(init=False)  # in the batch
    num_logits: int = field(init=False)  # rows at the end whose logits are wanted

    def __post_init__(self) -> None:
        self.num_rows = len(self.slots)
        self.num_logits = self.num_rows if self.session.wants_prompt_rows else int(self.samples)

    def verify(self, match: Match, slots: Sequence[int]) -> None:
        """Adds a tree, whose nodes have these slots; all rows' logits are wanted then."""
        self.match, self.slots = match, [*self.slots, *slots]
        self.num_rows = self.num_logits = len(self.slots)

    def segment(self) -> Segment:
        """The rows: a chunk of known tokens, or the newest token and the tree below it."""
        session = self.session
        if self.match is None:
            known = session.tokens[session.kv_len : session.kv_len + self.num_rows]
            return Segment(session.table_row, session.kv_len, known, self.slots, num_logits=self.num_logits)
        tree = self.match.tree
        known = session.tokens[session.kv_len : session.kv_len + self.num_rows - len(tree)]
        tokens = np.concatenate([known, tree.tokens])
        return Segment(
            session.table_row, session.kv_len, tokens, self.slots, depths=tree.row_depths, mask=tree.ancestor_mask(),
            num_logits=self.num_logits,
        )  # fmt: skip
