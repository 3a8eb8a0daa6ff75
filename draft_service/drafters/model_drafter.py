"""What drafters with a model share: drafts for sessions (session_drafter.py), and here for texts without one."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from itertools import count

import numpy as np
import torch

from draft_service.drafters.ahead import Preempted
from draft_service.drafters.base import Draft, DraftRequest, TextRequest
from draft_service.drafters.growing import Check
from draft_service.drafters.roster import StateT
from draft_service.drafters.session_drafter import SessionDrafter
from draft_service.session import Session
from outrider.errors import RETRY_SOON_S, InvalidArgument, ResourceExhausted
from outrider.v1 import verify_pb2
from outrider.wire import INT31_MAX

_text_uids = count(-1, -1)


class ModelDrafter(SessionDrafter[StateT]):
    """Implements base.Drafter but for which rows there are and what they hold."""

    def warm_up(self) -> None:
        """Runs the model once: kernels are compiled or loaded, and its weights paged in."""
        text = TextRequest(np.zeros(2, np.int32))
        with self._lock, torch.inference_mode():
            self._propose_now(text, self._blank_rows(1))

    async def propose(self, request: TextRequest) -> Draft:
        """A tree without a session. Where nobody waits for it any more, it ends before the model's next step."""
        given_up = threading.Event()
        try:
            return await asyncio.to_thread(self._propose, request, partial(_go_on_unless, given_up))
        finally:
            given_up.set()

    def _propose(self, request: TextRequest, check: Check) -> Draft:
        """A tree for a text, as for a session that is opened, drafted for once and closed. Any thread may call it."""
        features = self._rows_of(request)
        with self._lock, torch.inference_mode():
            return self._propose_now(request, features, check)

    def _propose_now(self, request: TextRequest, features: torch.Tensor | None, check: Check | None = None) -> Draft:
        session = _text_session(request)
        state = self._served.admit(session, self._new_state)
        try:
            if state is not None and features is not None:
                self._take_rows(state, features)
            while state is not None and self._num_runnable(state) > state.rows.num_rows and session in self._served:
                if check is not None:
                    check()
                self._catch_up([state])
            wanted = [DraftRequest(session, self.num_nodes(request.wishes))]
            draft = self._trees(wanted, self._starts(wanted), check)[0]
        finally:
            self._served.forget(session)
            refused = self._served.take_refused(session)
        if refused is None:
            return draft
        if refused.reason == verify_pb2.RELEASE_REASON_CAPACITY:
            raise ResourceExhausted(f"no tree can be drafted: {refused.detail}", retry_after_s=RETRY_SOON_S)
        raise InvalidArgument(f"tokens: {refused.detail}", field="tokens")

    def _rows_of(self, request: TextRequest) -> torch.Tensor | None:
        """The target's rows that came with a text; a model that reads none has no use for them."""
        return None

    def _take_rows(self, state: StateT, features: torch.Tensor) -> None:
        """Takes the target's rows of a text's positions."""

    def _blank_rows(self, count: int) -> torch.Tensor | None:
        """Rows of zeros as the target's might be; None for a model that reads none."""
        return None


def _go_on_unless(given_up: threading.Event) -> None:
    if given_up.is_set():
        raise Preempted


def _text_session(request: TextRequest) -> Session:
    return Session(
        uid=next(_text_uids), session_id=0, generation=0, prompt_len=len(request.tokens), remaining=INT31_MAX,
        vocabulary=request.vocabulary, vocab_size=request.vocab_size, wishes=request.wishes,
        corpus_scope=request.corpus_scope, prediction=np.empty(0, np.int32), tokens=request.tokens,
    )  # fmt: skip
