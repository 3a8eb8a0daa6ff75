"""The draft process of `bench useless`: the service as it is, over a drafter whose drafts never come true.

    python -m bench._wrong_draft VERIFY_ADDRESS DRAFT_MS

Each draft is a chain of tokens that no text has, said to be near certain; a call of the drafter burns DRAFT_MS of CPU
time on a thread of its own, as a model would, or none. Ends on SIGTERM.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import uvloop

from bench._parts import work
from bench._wire_clock import Clock
from draft_service.drafters.base import AheadRequest, Draft, DraftRequest, GivenUp, TextRequest
from draft_service.drafting import Drafting
from draft_service.link import Identity
from draft_service.overlap import FixedOverlap
from draft_service.planning import FixedPlanner
from draft_service.session import Extension, Session, Wishes
from draft_service.worker import Worker
from outrider import env
from outrider.supervisor import die_with_parent
from outrider.telemetry import configure_logging
from outrider.v1 import common_pb2
from outrider.wire import Ids

NUM_NODES = 11
MAX_SESSIONS = 256
_FIRST_TOKEN = 3  # of a dozen that the embedded model's texts never hold: marks of its training data
_CHANCE = 0.9  # said of each node


class WrongDrafter:
    """Implements base.Drafter; knows nothing."""

    algorithm = common_pb2.ALGORITHM_STANDALONE
    draft_model = "wrong"
    corpora = None
    num_draft_tokens = NUM_NODES + 1
    features = common_pb2.FeatureLayout(kind=common_pb2.FEATURE_KIND_NONE)
    target = common_pb2.ModelInfo()

    def __init__(self, draft_ms: float) -> None:
        self.inline = draft_ms == 0
        self._clock = Clock(draft_ms, burn=True)

    def open(self, sessions: Sequence[Session]) -> None:
        """Needs nothing of them."""

    def add_features(self, rows: Sequence[tuple[Session, common_pb2.FeatureRows]]) -> None:
        """See open."""

    def extend(self, extensions: Sequence[Extension]) -> None:
        """See open."""

    def close(self, sessions: Sequence[Session]) -> None:
        """See open."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Chains that are wrong from the first node on."""
        self._clock.spend(time.monotonic_ns())
        return [_chain(request.num_nodes, request.session.max_depth()) for request in requests]

    def draft_ahead(self, requests: Sequence[AheadRequest]) -> list[list[Draft]]:
        """Drafts the same chains below an outcome that never comes."""
        self._clock.spend(time.monotonic_ns())
        assumed = np.array([_FIRST_TOKEN + NUM_NODES], np.int32)
        return [
            [_chain(request.num_nodes, request.verifying.session.max_depth(1), assumed)]
            for request in requests
            if request.max_assumed
        ]

    def num_nodes(self, wishes: Wishes) -> int:
        """The number of nodes that is wished."""
        return (wishes.num_draft_tokens or self.num_draft_tokens) - 1

    def is_brief(self, sessions: Sequence[Session]) -> bool:
        """Whether there is no time to take."""
        return self.inline

    def take_given_up(self) -> list[GivenUp]:
        """No session is ever given up."""
        return []

    def warm_up(self) -> None:
        """Does nothing."""

    async def propose(self, request: TextRequest) -> Draft:
        """A chain."""
        return _chain(NUM_NODES, NUM_NODES)

    def close_down(self) -> None:
        """Holds nothing."""


def _chain(num_nodes: int, max_depth: int, assumed: Ids | None = None) -> Draft:
    count = max(0, min(num_nodes, max_depth, NUM_NODES))
    return Draft(
        np.arange(_FIRST_TOKEN, _FIRST_TOKEN + count, dtype=np.int32),
        np.arange(-1, count - 1, dtype=np.int32),
        np.array([_CHANCE ** (depth + 1) for depth in range(count)], np.float64),
        assumed=np.empty(0, np.int32) if assumed is None else assumed,
    )


def main(words: list[str]) -> int:
    """Runs the process."""
    address, draft_ms = words
    die_with_parent()
    configure_logging("draft")
    return uvloop.run(_serve(address, float(draft_ms)))


async def _serve(address: str, draft_ms: float) -> int:
    with ThreadPoolExecutor(1, thread_name_prefix="drafter") as executor:
        drafter = WrongDrafter(draft_ms)
        planner = FixedPlanner(FixedOverlap(on=bool(env.early_proposals())))
        drafting = Drafting(drafter, planner, executor=None if drafter.inline else executor)
        identity = Identity(f"wrong:{os.getpid()}", "bench", secrets.token_hex(8))
        worker = Worker([address], drafting, identity, max_sessions=MAX_SESSIONS)
        await work(worker)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
