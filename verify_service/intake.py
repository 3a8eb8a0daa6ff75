"""What drafters send, taken into the sessions' books: refused, quarantined or kept. Never trusts a drafter."""

from __future__ import annotations

import time

from outrider.errors import InvalidArgument
from outrider.telemetry import get_logger
from outrider.v1 import verify_pb2
from outrider.wire import MAX_DETAIL_CHARS
from verify_service.commands import Arrived, ProposalsArrived, Released
from verify_service.drafter import Drafter
from verify_service.drafters import MAX_REFUSALS, REFUSALS_FORGIVEN, Drafters
from verify_service.proposals import Refusal, Refused
from verify_service.step_failures import ends_the_engine

log = get_logger(__name__)

_RELEASE_REASONS = {number: name for name, number in verify_pb2.ReleaseReason.items()}


def hear(drafters: Drafters, frame: ProposalsArrived | Released) -> None:
    """Takes in what a drafter says. Whatever fails in it costs that drafter its stream, and no session its answer."""
    try:
        match frame:
            case ProposalsArrived(drafter, proposals, read):
                take_proposals(drafters, drafter, proposals, read)
            case Released(drafter, releases):
                take_releases(drafters, drafter, releases)
    except Exception as error:
        if ends_the_engine(error):
            raise
        log.error("a drafter's frame failed", drafter=frame.drafter.drafter_id, exc_info=error)
        drafters.expel(frame.drafter, "what it said could not be taken in; the server's log says why")


def take_proposals(
    drafters: Drafters, drafter: Drafter, proposals: list[Arrived], read: int | None = None
) -> None:  # fmt: skip
    """Keeps proposals for later matching; a malformed one quarantines its session from this drafter.

    read: see ProposalsArrived.
    """
    if read is not None:
        drafter.has_read(read)
    if proposals:
        drafter.missed_in_a_row = 0
    for arrived in proposals:
        if drafter.refusals >= MAX_REFUSALS:
            break
        _take(drafters, drafter, arrived)
    if drafter.refusals >= MAX_REFUSALS:
        _expel(drafters, drafter)
    drafter.taken()
    if drafter.outbox.num_bytes:  # refusals; waking the event loop for nothing costs the step that may start now
        drafter.wake()


def take_releases(drafters: Drafters, drafter: Drafter, releases: list[verify_pb2.Release]) -> None:
    """Closes sessions that the drafter gave up; it does not get them again."""
    for release in releases:
        assignment = drafter.find(release.session, release.generation)
        if assignment is not None:
            drafter.counts["released"] += 1
            reason, detail = _RELEASE_REASONS.get(release.reason), release.detail[:MAX_DETAIL_CHARS]
            log.debug(
                "session released", drafter=drafter.drafter_id, session=release.session, reason=reason, detail=detail
            )
            drafters.close(assignment.session, verify_pb2.CLOSE_REASON_REASSIGNED, bar=True)
            continue
        drafter.refusals += 1
        if drafter.refusals >= MAX_REFUSALS:
            _expel(drafters, drafter)
            break
    drafter.taken()


def _expel(drafters: Drafters, drafter: Drafter) -> None:
    drafters.expel(
        drafter,
        f"{MAX_REFUSALS} proposals were refused or drove out others, or releases named what it has not; few were kept",
    )


def _take(drafters: Drafters, drafter: Drafter, arrived: Arrived) -> None:
    assignment = drafter.find(arrived.session, arrived.generation)
    proposal = arrived.proposal
    if assignment is None or proposal is None:
        drafter.refuse(arrived.session, arrived.generation, Refused(arrived.proposal_id, Refusal.FOREIGN))
        return
    session = assignment.session
    try:
        if isinstance(proposal, InvalidArgument):
            raise proposal
        num_idle = assignment.book.num_idle
        gone = assignment.book.add(proposal, session.committed, explain=drafter.is_told_why)
    except InvalidArgument as error:
        log.warning("malformed proposal", drafter=drafter.drafter_id, session=session.session_id, error=error.message)
        malformed = Refused(arrived.proposal_id, Refusal.MALFORMED, error.message)
        drafter.refuse(arrived.session, arrived.generation, malformed)
        drafters.close(session, verify_pb2.CLOSE_REASON_QUARANTINED, bar=True)
        return
    for refused in gone:
        drafter.refuse(arrived.session, arrived.generation, refused)
    if assignment.book.num_idle > num_idle:
        drafter.refusals += 1
    elif not gone and proposal.tree_len > assignment.forgiven_len:
        assignment.forgiven_len = proposal.tree_len
        drafter.refusals = max(0, drafter.refusals - REFUSALS_FORGIVEN)
    if all(refused.proposal_id != arrived.proposal_id for refused in gone):
        drafter.counts["kept"] += 1
        drafter.totals.proposed_tokens += len(proposal.tree)
    if not proposal.is_early:
        drafted = len(proposal.tree) > 0
        assignment.answered(proposal.tree_len, time.monotonic_ns(), drafted=drafted)
