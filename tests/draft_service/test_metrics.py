"""What a draft process tells, against what its links did."""

from __future__ import annotations

from pathlib import Path

import pytest

from draft_service.metrics import make_registry
from outrider.v1 import verify_pb2 as pb
from tests.draft_service.fake_verify import FakeVerify, following, opened, verdict
from tests.draft_service.test_worker import LOOP, WAITING, Sleeps, serving
from tests.polling import until_async


@pytest.mark.asyncio
async def test_the_numbers_are_those_of_what_was_done(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/verify.sock"
    sleeps = Sleeps()
    async with FakeVerify(address) as verify, serving([address], early=True, sleep=sleeps) as worker:
        stream = await verify.stream()
        stream.tell(opened=[opened(1, LOOP, prompt_len=1)])
        first = await stream.proposals()
        credit = pb.Credit(proposal_id=1, root_node=-1, nodes_verified=4, accepted_nodes=[0])
        refused = pb.Rejected(session=1, generation=1, proposal_id=7, reason=pb.REJECT_REASON_STALE)
        stream.tell(
            verdicts=[verdict(1, 12, [12, 13], credits=[credit], next=following(WAITING, 14))], rejected=[refused]
        )
        second = [*await stream.proposals(), *await stream.proposals()]  # the tree, and those below its outcomes
        (link,) = worker.links
        registry = make_registry(link.drafting.drafter, link.drafting, worker)

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(name, {"algorithm": "NGRAM", **labels})

        assert value("outrider_draft_links", state="enlisted") == 1
        assert value("outrider_draft_links", state="refused") == 0
        assert value("outrider_draft_sessions", replica=address) == 1
        assert value("outrider_draft_rounds_total", replica=address) == 2
        assert value("outrider_draft_verdict_tokens_total", replica=address) == 2
        assert value("outrider_draft_nodes_verified_total", replica=address) == 4
        assert value("outrider_draft_nodes_accepted_total", replica=address) == 1
        assert value("outrider_draft_rejected_total", replica=address, reason="stale") == 1
        sent = [*first, *second]
        # They are counted once they are out.
        await until_async(lambda: link.stats.proposals == len(sent), "proposals are not counted", pause_s=0)
        for kind, some in (
            ("tree", [p for p in sent if not p.assumed]), ("early", [p for p in sent if p.assumed])
        ):  # fmt: skip
            assert value("outrider_draft_proposals_total", kind=kind) == len(some) > 0
            assert value("outrider_draft_nodes_total", kind=kind) == sum(len(p.tokens) // 4 for p in some)
            assert (value("outrider_draft_seconds_count", kind=kind) or 0) > 0
        assert (value("outrider_ngram_nodes") or 0) > 0
        assert value("outrider_ngram_capacity_nodes") == 50_000
        assert value("outrider_ngram_dropped_tokens_total") == 0
        stream.end()
        await sleeps.next()
        await verify.stream()  # the table goes with its stream, its counts stay
        assert value("outrider_draft_nodes_verified_total", replica=address) == 4
