"""Drafts copied from a session's own text: what followed where its newest tokens stood before.

Answers repeat their prompts and themselves: quotations, code that is edited, lists. A copy comes true much deeper there
than a draft model's tree, and takes microseconds to make. The idea is prompt lookup's; that copy or model is chosen by
what is to be expected of each, SuffixDecoding's (arXiv 2411.04975).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from draft_service.drafters.base import Draft
from draft_service.repetition import CopyRates, Text
from draft_service.session import Copied, Extension, Session
from draft_service.sessions import InVerification, SessionTable
from outrider.tree import ROOT

DEFAULT_TOKENS = 16  # of a copy, at most
CATCH_UP = 32  # tokens for which a draft model was not asked, after which it reads them
_LEAST_CHANCE, _LIKELY = 0.25, 0.5  # of a path that is proposed; of what is assumed while a step runs
_MODEL_PRIOR = 1.0  # nodes of a draft model that are accepted, before any were
_ALPHA, _SHARED_ALPHA = 0.1, 0.02


@dataclass(slots=True, eq=False)
class _Known:
    """What is known of one session's text."""

    text: Text
    from_model: float  # nodes of the draft model's proposals that were accepted, on average
    read_len: int  # tokens that the model has read, or is about to
    copied_len: int = 0  # tokens after which there was a copy last


class Copier:
    """Copies for sessions of any table. most: tokens of a copy.

    Requests that fix their trees get none: what they fix is a draft model's.
    """

    def __init__(self, most: int = DEFAULT_TOKENS) -> None:
        self._most = most
        self._rates = CopyRates()
        self._from_model = _MODEL_PRIOR
        self._known: dict[int, _Known] = {}  # by uid
        self.num_copies = self.num_nodes = self.num_accepted = 0  # the last two: nodes of these

    def drafts(
        self, table: SessionTable, sessions: Sequence[Session], extensions: Sequence[Extension], *, is_asked: bool
    ) -> tuple[dict[Session, Draft], list[Session]]:
        """Copies in place of the draft model's trees, after these verdicts; and the sessions that are left to it.

        is_asked: whether the model drafts for those.
        """
        self._learn(extensions)
        copies: dict[Session, Draft] = {}
        left: list[Session] = []
        for session in sessions:
            known = self._known.get(session.uid)
            if known is not None and known.copied_len == len(session.tokens):
                continue  # rows came after their verdict, and it was drafted for then
            draft = self.draft(session, table.node_limit(session), is_asked=is_asked)
            if draft is None:
                left.append(session)
            else:
                copies[session] = draft
        return copies, left

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

    def draft(self, session: Session, num_nodes: int, *, is_asked: bool = True) -> Draft | None:
        """A chain of at most `num_nodes`; None where the model's tree, if it is asked, is expected to bring more."""
        known = self._looked_up(session)
        if known is None:
            return None
        least = known.from_model if is_asked else 0.0
        draft = self._chain(known, 0, min(num_nodes, session.max_depth()), least)
        if draft is not None:
            known.copied_len = len(session.tokens)
        elif is_asked:
            known.read_len = len(session.tokens)
        return draft

    def draft_ahead(self, verifying: InVerification, max_assumed: int, num_nodes: int) -> Draft | None:
        """A chain below what a copy would have come next, as far as the tree that is being verified has it, and one on.

        None as for `draft`, and where that is less likely than not.
        """
        session, tree = verifying.session, verifying.tree
        known = self._looked_up(session)
        if known is None or not known.text.match_len:
            return None
        assumed, node = known.text.following(0, tree.depth + 1), ROOT
        for count, token in enumerate(assumed.tolist(), 1):
            child = tree.child(node, token)
            if child is None:
                assumed = assumed[:count]
                break
            node = child
        likely = known.text.rates.chances(known.text.match_len, len(assumed), _LIKELY)
        if len(assumed) > max_assumed or len(likely) < len(assumed):
            return None
        most = min(num_nodes, session.max_depth(len(assumed)))
        draft = self._chain(known, len(assumed), most, known.from_model)
        if draft is not None:
            draft.assumed = assumed
        return draft

    def take_behind(self, sessions: Iterable[Session]) -> list[Session]:
        """Sessions with CATCH_UP or more tokens that the draft model has not read; it is about to."""
        behind: list[Session] = []
        for session in sessions:
            known = self._known.get(session.uid)
            if known is not None and len(session.tokens) - known.read_len >= CATCH_UP:
                known.read_len = len(session.tokens)
                behind.append(session)
        return behind

    def forget(self, sessions: Sequence[Session]) -> None:
        """Drops what is known of sessions that are closed."""
        for session in sessions:
            self._known.pop(session.uid, None)

    def _learn(self, extensions: Sequence[Extension]) -> None:
        """Takes in what was accepted, of copies and of the draft model's proposals."""
        for extension in extensions:
            known = self._known.get(extension.session.uid)
            for credit in extension.verdict.credits:
                sent, accepted = extension.session.sent.get(credit.proposal_id), len(credit.accepted_nodes)
                if sent is None:
                    continue
                if isinstance(sent.memo, Copied):
                    self.num_accepted += accepted
                elif known is not None:
                    known.from_model += _ALPHA * (accepted - known.from_model)
                    self._from_model += _SHARED_ALPHA * (accepted - self._from_model)

    def _looked_up(self, session: Session) -> _Known | None:
        """The session's text with the match of its newest tokens looked up; None where nothing is copied for it."""
        if session.wishes.has_any or len(session.tokens) == session.prompt_len:
            return None
        known = self._known.get(session.uid)
        if known is None:
            text = Text(CopyRates(self._rates), session.prediction, session.prompt_len)
            known = self._known[session.uid] = _Known(text, self._from_model, len(session.tokens))
        known.text.look(session.tokens)
        return known

    def _chain(self, known: _Known, num_assumed: int, most: int, least: float) -> Draft | None:
        """The copy after `num_assumed` assumed tokens; None where no more than `least` is expected to be accepted."""
        text, count = known.text, min(self._most, most)
        if not text.match_len or count < 1:
            return None
        match_len = text.match_len + num_assumed
        chances = text.rates.chances(match_len, count, _LEAST_CHANCE)
        if sum(chances) <= least:
            return None
        count = len(chances)
        self.num_copies += 1
        self.num_nodes += count
        return Draft(
            text.following(num_assumed, count), np.arange(-1, count - 1, dtype=np.int32), np.array(chances),
            text.from_prediction(num_assumed, count), memo=Copied(match_len),
        )  # fmt: skip
