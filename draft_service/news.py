"""Verdicts that have come and are not applied yet: what a drafter that works ahead looks at between two steps."""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.session import Session
from outrider.v1 import verify_pb2
from outrider.wire import Ids

Key = tuple[int, int]  # session, generation


class News:
    """The event loop notes rounds and takes them; the drafter's thread may ask meanwhile."""

    def __init__(self) -> None:
        self._rounds: list[verify_pb2.Round] = []
        self._committed: dict[Key, tuple[int, list[int]]] = {}  # replaced whole, never changed: no lock is needed

    def note(self, round: verify_pb2.Round) -> None:
        """A round has come."""
        self._rounds.append(round)
        self._refresh()

    def taken(self, rounds: Sequence[verify_pb2.Round]) -> None:
        """These are being applied."""
        ids = set(map(id, rounds))
        self._rounds = [round for round in self._rounds if id(round) not in ids]
        self._refresh()

    def leaves(self, session: Session, assumed: Ids) -> bool:
        """Whether a verdict has come for the session that commits something else than `assumed` and what follows it."""
        found = self._committed.get(session.key)
        if found is None:
            return False
        base_len, tokens = found
        return base_len != len(session.tokens) or tokens[: len(assumed)] != assumed.tolist()

    def _refresh(self) -> None:
        committed: dict[Key, tuple[int, list[int]]] = {}
        for round in self._rounds:
            for verdict in round.verdicts:
                base_len, tokens = committed.get((verdict.session, verdict.generation), (verdict.base_len, []))
                committed[verdict.session, verdict.generation] = base_len, [*tokens, *verdict.tokens]
        self._committed = committed
