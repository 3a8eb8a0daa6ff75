"""A drafter's stream over mutual TLS with a token, and what it says where either is wrong."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from draft_service.drafters.ngram import NgramDrafter
from draft_service.drafting import Drafting
from draft_service.worker import Worker
from outrider import serving
from outrider.args import DraftArgs
from outrider.backoff import Backoff
from outrider.dialing import dialer_of
from outrider.v1 import draft_pb2, verify_pb2_grpc
from tests.certificates import MutualTls
from tests.draft_service.fake_verify import FakeVerify, opened
from tests.draft_service.test_worker import IDENTITY, LOOP, Sleeps


@pytest.mark.asyncio
async def test_a_drafter_enlists_over_mutual_tls_once_its_certificate_and_token_are_right(tmp_path: Path) -> None:
    tls = MutualTls.between(tmp_path, "draft", expired=True)
    verify, server = FakeVerify(""), serving.create_server(tls.verify)
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(verify, server)
    (address,) = serving.listen(server, tls.verify, tls.verify.listen)
    await server.start()
    # What a name is looked up as: the certificate must still have the name.
    args = DraftArgs(
        verify_address=(f"localhost:{address.rpartition(':')[2]}",), speculative_ngram_capacity=50_000, **tls.client
    )
    sleeps, drafter = Sleeps(), NgramDrafter.from_args(args)
    worker = Worker(
        [address], Drafting(drafter), IDENTITY, max_sessions=4, sleep=sleeps,
        backoff=lambda: Backoff(rng=random.Random(0)), dial=dialer_of(args, args.verify_address, args.token_file),
    )  # fmt: skip
    running = asyncio.create_task(worker.run())
    try:
        await sleeps.next()
        assert worker.links[0].stats.last_error.startswith("UNAVAILABLE")  # an expired certificate
        tls.authority.issue("draft")
        for _ in range(5):  # gRPC may lose why a call ended that was being written to
            await sleeps.next()
            if not worker.links[0].stats.last_error.startswith("UNAVAILABLE: the call ended while"):
                break
        assert worker.links[0].stats.last_error.startswith("UNAUTHENTICATED")
        tls.correct_token()
        stream = await verify.stream()
        stream.tell(opened=[opened(1, LOOP, prompt_len=1)])
        await stream.proposals()
        assert worker.links[0].stats.state == draft_pb2.VERIFY_LINK_STATE_ENLISTED
    finally:
        running.cancel()
        await worker.drain(0)
        await server.stop(None)
        drafter.close_down()
