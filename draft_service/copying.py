"""Drafts copied from a session's own text: what followed where its newest tokens stood before.

Answers repeat their prompts and themselves: quotations, code that is edited, lists. A copy comes true much deeper there
than a draft model's tree, and takes microseconds to make. The idea is prompt lookup's; that copy or model is chosen by
what is to be expected of each, SuffixDecoding's (arXiv 2411.04975).

What is expected is learnt from the text alone: wherever a match is found, what is committed next tells whether a copy
would have come true, also where none was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draft_service.drafters.base import Draft
from draft_service.drafters.compiled import compiled
from draft_service.session import Extension, Session
from draft_service.sessions import InVerification, SessionTable
from outrider.tree import ROOT
from outrider.wire import Ids

DEFAULT_TOKENS = 16  # of a copy, at most
MIN_MATCH = 3  # newest tokens that must have stood there before
CATCH_UP = 64  # tokens for which a draft model was not asked, after which it reads them
_MOST_MATCH = 16  # longer matches say no more
_LEAST_CHANCE, _LIKELY = 0.25, 0.5  # of a path that is proposed; of what is assumed while a step runs
_PRIOR_WEIGHT, _WINDOW = 8.0, 128.0  # tries by match length; those after which old ones fade
_SHARED_WEIGHT = 8.0  # tries of its own after which a session counts as much as all others
_MODEL_PRIOR = 1.0  # nodes of a draft model that are accepted, before any were
_ALPHA, _SHARED_ALPHA = 0.1, 0.02
_FIRST_SIZE = 1024

Table = NDArray[np.int32]


class Copied(NamedTuple):
    """Memo of a copy: each token is that `distance` before it, and the `match_len` before the first are too."""

    distance: int
    match_len: int


class CopyRates:
    """How often the next token is that of the copy, by the length of the match so far.

    shared: of all sessions, where this is one's own.
    """

    def __init__(self, shared: CopyRates | None = None) -> None:
        self._shared = shared
        lengths = np.arange(_MOST_MATCH + 1)
        self._tries = np.zeros(_MOST_MATCH + 1) if shared else np.full(_MOST_MATCH + 1, _PRIOR_WEIGHT)
        self._hits = self._tries * lengths / (lengths + 1)

    def chances(self, match_len: int, count: int) -> NDArray[np.float64]:
        """float64 [count]: that a copy after such a match comes true up to each of its tokens."""
        lengths = np.minimum(np.arange(match_len, match_len + count), _MOST_MATCH)
        return np.cumprod(self._rates()[lengths], dtype=np.float64)

    def observe(self, match_len: int, hits: int, *, missed: bool) -> None:
        """After such a match so many tokens were the copy's, and then, if it missed, one was not."""
        for length in range(match_len, match_len + hits + missed):
            at = min(length, _MOST_MATCH)
            self._tries[at] += 1.0
            self._hits[at] += length < match_len + hits
            if self._tries[at] > _WINDOW:
                self._tries[at] /= 2
                self._hits[at] /= 2
        if self._shared is not None:
            self._shared.observe(match_len, hits, missed=missed)

    def _rates(self) -> NDArray[np.float64]:
        if self._shared is None:
            return self._hits / self._tries
        return (_SHARED_WEIGHT * self._shared._rates() + self._hits) / (_SHARED_WEIGHT + self._tries)


@dataclass(slots=True, eq=False)
class _Text:
    """One session's. table: int32, by hash of MIN_MATCH tokens, the place after where they stood last; 0: nowhere."""

    rates: CopyRates
    from_model: float  # nodes of the draft model's proposals that were accepted, on average
    read_len: int  # tokens that the model has read, or is about to
    table: Table = field(default_factory=lambda: np.zeros(_FIRST_SIZE, np.int32))
    known: int = 0  # tokens that are in the table
    source: int = 0  # where the last match ended; 0: there was none
    match_len: int = 0

    @property
    def distance(self) -> int:
        """From the newest tokens back to where they stood."""
        return self.known - self.source

    def look(self, tokens: Ids) -> None:
        """Finds the newest tokens' last match, and learns how the one before went on."""
        if 2 * len(tokens) > len(self.table):
            self.table, known = np.zeros(4 << len(tokens).bit_length(), np.int32), 0
        else:
            known = self.known
        if known == len(tokens):
            return
        agreed, source, match_len = _look(self.table, tokens, known, self.known, self.source)
        if self.source:
            self.rates.observe(self.match_len, agreed, missed=agreed < len(tokens) - self.known)
        self.known, self.source, self.match_len = len(tokens), source, match_len


class Copier:
    """Copies for sessions of any table. most: tokens of a copy.

    Requests that fix their trees get none: what they fix is a draft model's.
    """

    def __init__(self, most: int = DEFAULT_TOKENS) -> None:
        self._most = most
        self._rates = CopyRates()
        self._from_model = _MODEL_PRIOR
        self._texts: dict[int, _Text] = {}  # by uid

    def drafts(
        self, table: SessionTable, sessions: Sequence[Session], extensions: Sequence[Extension]
    ) -> dict[Session, Draft]:
        """In place of the draft model's trees, after these verdicts; without those that are left to it."""
        self._learn(extensions)
        found = {session: self.draft(session, table.node_limit(session)) for session in sessions}
        return {session: draft for session, draft in found.items() if draft is not None}

    def drafts_ahead(
        self, table: SessionTable, verifying: Sequence[InVerification]
    ) -> tuple[list[tuple[Session, Draft]], list[InVerification]]:
        """Copies below what is likely to be committed next, and the trees that are left to the draft model.

        A copy that is being verified is not: a head would have to run all of its nodes first.
        """
        copies: list[tuple[Session, Draft]] = []
        left: list[InVerification] = []
        for item in verifying:
            copy = self.draft_ahead(item, table.max_assumed, table.node_limit(item.session))
            if copy is not None:
                copies.append((item.session, copy))
            elif not isinstance(item.memo, Copied):
                left.append(item)
        return copies, left

    def draft(self, session: Session, num_nodes: int) -> Draft | None:
        """A chain of at most `num_nodes`; None where the model's tree is to be expected to bring more."""
        text = self._looked_up(session)
        if text is None:
            return None
        draft = self._chain(text, session.tokens, 0, min(num_nodes, session.max_depth()))
        if draft is None:
            text.read_len = len(session.tokens)
        return draft

    def draft_ahead(self, verifying: InVerification, max_assumed: int, num_nodes: int) -> Draft | None:
        """A chain below what a copy would have come next, as far as the tree that is being verified has it, and one on.

        None as for `draft`, and where that is less likely than not.
        """
        session, tree = verifying.session, verifying.tree
        text = self._looked_up(session)
        if text is None or not text.source:
            return None
        assumed, node = _following(session.tokens, text.distance, tree.depth + 1), ROOT
        for count, token in enumerate(assumed.tolist(), 1):
            child = tree.child(node, token)
            if child is None:
                assumed = assumed[:count]
                break
            node = child
        if len(assumed) > max_assumed or text.rates.chances(text.match_len, len(assumed))[-1] < _LIKELY:
            return None
        most = min(num_nodes, session.max_depth(len(assumed)))
        draft = self._chain(text, np.concatenate([session.tokens, assumed]), len(assumed), most)
        if draft is not None:
            draft.assumed = assumed
        return draft

    def take_behind(self, sessions: Iterable[Session]) -> list[Session]:
        """Those of whose tokens the draft model has not read CATCH_UP or more; it is about to."""
        behind: list[Session] = []
        for session in sessions:
            text = self._texts.get(session.uid)
            if text is not None and len(session.tokens) - text.read_len >= CATCH_UP:
                text.read_len = len(session.tokens)
                behind.append(session)
        return behind

    def forget(self, sessions: Sequence[Session]) -> None:
        """They are closed."""
        for session in sessions:
            self._texts.pop(session.uid, None)

    def _learn(self, extensions: Sequence[Extension]) -> None:
        """Takes in what was accepted of the draft model's proposals."""
        for extension in extensions:
            session = extension.session
            text = self._texts.get(session.uid)
            for credit in extension.verdict.credits if text is not None else ():
                sent = session.sent.get(credit.proposal_id)
                if text is None or sent is None or isinstance(sent.memo, Copied):
                    continue
                accepted = len(credit.accepted_nodes)
                text.from_model += _ALPHA * (accepted - text.from_model)
                self._from_model += _SHARED_ALPHA * (accepted - self._from_model)

    def _looked_up(self, session: Session) -> _Text | None:
        """With the match of its newest tokens; None for one that is not copied for."""
        if session.wishes.has_any or len(session.tokens) == session.prompt_len:
            return None
        text = self._texts.get(session.uid)
        if text is None:
            rates = CopyRates(self._rates)
            text = self._texts[session.uid] = _Text(rates, self._from_model, len(session.tokens))
        text.look(session.tokens)
        return text

    def _chain(self, text: _Text, tokens: Ids, num_assumed: int, most: int) -> Draft | None:
        """What follows `tokens`, of which the last were assumed; None where no more is expected than of the model."""
        count = min(self._most, most)
        if not text.source or count < 1:
            return None
        match_len = text.match_len + num_assumed
        chances = text.rates.chances(match_len, count)
        chances = chances[: np.count_nonzero(chances >= _LEAST_CHANCE)]
        if chances.sum() <= text.from_model:
            return None
        parents = np.arange(-1, len(chances) - 1, dtype=np.int32)
        memo = Copied(text.distance, match_len)
        return Draft(_following(tokens, text.distance, len(chances)), parents, chances, memo=memo)


def warm_up() -> None:
    """Compiles, or loads, what looks matches up."""
    text = _Text(CopyRates(), 0.0, 0)
    text.look(np.zeros(MIN_MATCH + 1, np.int32))


def is_copied(extension: Extension) -> bool:
    """Whether its verdict is on a copy."""
    sent = extension.session.sent
    return any(
        isinstance(found.memo, Copied)
        for credit in extension.verdict.credits
        if (found := sent.get(credit.proposal_id)) is not None
    )


def _following(tokens: Ids, distance: int, count: int) -> Ids:
    """`count` tokens that go on as those `distance` before them did: over and over, where there are fewer."""
    return np.resize(tokens[-distance:], count)


@compiled
def _look(table: Table, tokens: Ids, known: int, base: int, source: int) -> tuple[int, int, int]:
    """Takes tokens from `known` on into the table, and finds the newest ones'.

    Returns how many tokens from `base` on are those from `source` on; where the newest tokens' last match ended, 0 for
    none; and its length.
    """
    end = len(tokens)
    agreed = 0
    while source and base + agreed < end and tokens[source + agreed] == tokens[base + agreed]:
        agreed += 1
    for at in range(max(known, MIN_MATCH), end):
        table[_slot(table, tokens, at)] = at
    if end < MIN_MATCH:
        return agreed, 0, 0
    found = table[_slot(table, tokens, end)]
    length = 0
    while length < _MOST_MATCH and length < found and tokens[found - 1 - length] == tokens[end - 1 - length]:
        length += 1
    if length < MIN_MATCH:
        return agreed, 0, 0
    return agreed, found, length


@compiled
def _slot(table: Table, tokens: Ids, at: int) -> int:
    """Of the tokens before `at`."""
    mixed = np.int64(0)
    for token in tokens[at - MIN_MATCH : at]:
        mixed = (mixed ^ np.int64(token)) * np.int64(0x2545F4914F6CDD1D)
    return int((mixed ^ (mixed >> 29)) & (len(table) - 1))
