"""What a failed step means: for its sessions, and for the engine."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from kernels.acceptance import Accepted
from outrider.errors import Internal
from outrider.telemetry import get_logger
from verify_service.committing import Committer
from verify_service.planner import ms_since
from verify_service.session_pages import SessionPages
from verify_service.work import Work

log = get_logger(__name__)

# After so many steps in a row that failed for every one of their sessions it is the engine that is at fault.
MAX_FAILED_STEPS = 3


class StepFailures:
    """Finds for whom a step fails. outcomes: computes a step's; in_a_row: steps that failed for every session."""

    def __init__(
        self, outcomes: Callable[[list[Work]], list[Accepted | None]], pages: SessionPages, committer: Committer
    ) -> None:
        self.in_a_row = 0
        self._outcomes = outcomes
        self._pages = pages
        self._committer = committer

    def run_apart(self, works: list[Work], error: Exception) -> int:
        """Runs the sessions of a failed step one by one, so that only those end which it fails for.

        Returns the number of tokens committed; raises the error when the engine is at fault.
        """
        if ends_the_engine(error):
            raise error
        log.error("a step failed; its sessions are run one by one", sessions=len(works), exc_info=error)
        self.in_a_row += 1
        sent = sum([self._run_alone(work) for work in works])
        if self.in_a_row >= MAX_FAILED_STEPS:
            raise error
        return sent

    def _run_alone(self, work: Work) -> int:
        work.session.drop_prompt_logprobs()
        start_ns = time.monotonic_ns()
        try:
            outcomes = self._outcomes([work])
        except Exception as failure:
            if ends_the_engine(failure):
                raise
            log.error("a step failed for one session", session=work.session.session_id, exc_info=failure)
            self._pages.keep(work.session, work.slots, [])
            self._committer.fail(work.session, Internal("this request cannot be computed; the server's log says why"))
            return 0
        self.in_a_row = 0
        step_us = int(ms_since(start_ns) * 1000)
        return self._committer.commit([work], outcomes, step_us=step_us, batch_tokens=work.num_rows)


def ends_the_engine(error: Exception) -> bool:
    """Whether nothing can be computed any more: a device's errors stay, but for want of memory."""
    return isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError)
