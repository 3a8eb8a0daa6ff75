"""A drafter in verify's own process: the same protocol, the same output."""

from __future__ import annotations

from typing import Any, cast

import pytest

from outrider.in_memory import InMemoryServer
from outrider.sampling import SamplingParams
from outrider.v1 import verify_pb2_grpc
from tests.fake_drafters import FakeDrafter, Truth, perfect
from tests.fakes import ToyModel
from tests.verify_service.conftest import Serve
from tests.verify_service.rig import request

MODEL = ToyModel(vocab_size=32, order=3)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.mark.asyncio
async def test_drafts_over_memory_are_accepted_and_change_nothing(serve: Serve) -> None:
    service = await serve(MODEL)
    expected = MODEL.greedy([1], 40)
    server = InMemoryServer()
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(service.servicer, cast(Any, server))
    async with server.dial("") as channel:
        stub: Any = verify_pb2_grpc.VerifyServiceStub(channel)
        drafter = FakeDrafter(stub, perfect(Truth([[1, *expected]])), name="near")
        await drafter.start()
        await service.inbox.until(lambda: service.drafter(drafter) is not None)
        enlisted = service.drafter(drafter)
        assert enlisted is not None
        enlisted.replies.mean_ms = 1e12
        responses = await service.generate(request([1], GREEDY))
        assert [token for response in responses for token in response.tokens] == expected
        await service.inbox.idle()
        assert drafter.view.num_accepted > 20
        await drafter.close()
    await service.inbox.until(lambda: not service.engine.drafters)
