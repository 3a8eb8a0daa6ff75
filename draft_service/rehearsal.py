"""A session played to a drafter before any verify service hears of it.

A process's first rounds take two to three times as long as later ones: kernels are loaded, memory is first touched,
the interpreter has not seen its code. Verify judges a drafter by its first rounds too, and waits for drafts no longer
than they can be worth: without this it missed most of the first ten, and fell silent.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from draft_service.counting import DraftCounts
from draft_service.drafters.features import pack_rows
from draft_service.drafting import Drafting
from draft_service.planning import FixedPlanner
from draft_service.sessions import SessionTable
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import pack_ids

_PROMPT_LEN = 16
_ROUNDS = 24
_MOST_S = 2.0  # of a large model's rounds fewer do: what it computes is most of them
_SESSION = 1


async def rehearse(drafting: Drafting) -> None:
    """Rounds of a session whose drafts are never verified; no trace of it stays, nor does the planner hear of it."""
    planner, drafting.planner = drafting.planner, FixedPlanner()
    limits = verify_pb2.DrafterLimits(max_proposals_per_session=4)
    table, deadline_s = SessionTable(verify_pb2.Enlisted(limits=limits), max_sessions=1), time.monotonic() + _MOST_S
    try:
        await _play(drafting, table, _first_round(drafting))
        for base_len in range(_PROMPT_LEN + 1, _PROMPT_LEN + 1 + _ROUNDS):
            await _play(drafting, table, verify_pb2.Round(verdicts=[_verdict(drafting, base_len)]))
            if time.monotonic() > deadline_s:
                break
        await _play(drafting, table, verify_pb2.Round(closed=[verify_pb2.Closed(session=_SESSION, generation=1)]))
    finally:
        drafting.planner, drafting.counts = planner, DraftCounts()


async def _play(drafting: Drafting, table: SessionTable, round: verify_pb2.Round) -> None:
    async def send(frame: verify_pb2.SpeculateRequest) -> None:
        frame.SerializeToString()

    read = verify_pb2.Round.FromString(round.SerializeToString())
    await drafting.serve(table, [read], send)


def _first_round(drafting: Drafting) -> verify_pb2.Round:
    opened = verify_pb2.Opened(
        session=_SESSION, generation=1, tokens=pack_ids(np.arange(_PROMPT_LEN, dtype=np.int32) % 8),
        prompt_len=_PROMPT_LEN,
        remaining_tokens=2 * _ROUNDS, remaining_context=2 * _ROUNDS,
        # As one that fixes its tree, which is the drafter's whatever the text repeats.
        speculative=common_pb2.SpeculativeParams(enabled=True, num_draft_tokens=drafting.drafter.num_draft_tokens),
    )  # fmt: skip
    round = verify_pb2.Round(opened=[opened], verdicts=[_verdict(drafting, _PROMPT_LEN)])
    if (rows := _rows(drafting, 0, _PROMPT_LEN - 1)) is not None:
        round.features.add(session=_SESSION, generation=1, rows=rows)
    return round


def _verdict(drafting: Drafting, base_len: int) -> verify_pb2.Verdict:
    following = verify_pb2.Next(kind=verify_pb2.NEXT_KIND_WAITING, base_len=base_len + 1)
    rows = _rows(drafting, base_len - 1, 1)
    return verify_pb2.Verdict(
        session=_SESSION, generation=1, base_len=base_len, tokens=[base_len % 8], next=following, features=rows
    )


def _rows(drafting: Drafting, first_pos: int, count: int) -> common_pb2.FeatureRows | None:
    """Rows of zeros as the target's might be; None for a drafter that reads none."""
    width = drafting.drafter.features.width
    if not width:
        return None
    rows = pack_rows(torch.zeros(count, width, dtype=torch.bfloat16))
    return common_pb2.FeatureRows(first_pos=first_pos, count=count, rows=rows)
