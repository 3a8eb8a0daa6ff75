"""Verdicts that have come and are not applied yet: what a drafter that works ahead looks at between two steps."""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.session import Session
from outrider.v1 import verify_pb2
from outrider.wire import Ids


class News:
    """The event loop notes rounds and takes them; the drafter's thread may ask meanwhile."""

    def __init__(self) -> None:
        self._rounds: list[verify_pb2.Round] = []  # replaced whole, never changed: no lock is needed

    def note(self, round: verify_pb2.Round) -> None:
        """Notes that a round has come."""
        self._rounds = [*self._rounds, round]

    def taken(self, rounds: Sequence[verify_pb2.Round]) -> None:
        """Notes that these rounds are being applied."""
        ids = set(map(id, rounds))
        self._rounds = [round for round in self._rounds if id(round) not in ids]

    def leaves(self, session: Session, assumed: Ids) -> bool:
        """Whether a verdict has come for the session that commits something else than `assumed` and what follows it."""
        rounds = self._rounds
        if not rounds:
            return False
        verdicts = [
            verdict
            for round in rounds
            for verdict in round.verdicts
            if (verdict.session, verdict.generation) == session.key
        ]
        if not verdicts:
            return False
        tokens = [token for verdict in verdicts for token in verdict.tokens]
        return verdicts[0].base_len != len(session.tokens) or tokens[: len(assumed)] != assumed.tolist()
