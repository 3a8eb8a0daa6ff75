"""AdminService: what operators switch, what becomes of the sessions, and who is let in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import grpc
import grpc.aio
import pytest

from outrider import rpc, serving
from outrider.args import VerifyArgs
from outrider.auth import TokenFile
from outrider.dialing import Dialer
from outrider.errors import InvalidArgument, NotFound, Unauthenticated
from outrider.sampling import SamplingParams
from outrider.v1 import admin_pb2 as pb
from outrider.v1 import admin_pb2_grpc, common_pb2
from tests.fake_drafters import Truth, perfect
from tests.verify_service.conftest import Serve, Service, error_of, tokens_of
from tests.verify_service.held import MODEL, OUTPUT, PROMPT, TEXT
from tests.verify_service.rig import request
from verify_service.admin import MAX_CALLS, PATH, AdminServicer
from verify_service.commands import Ask

LONG = SamplingParams(temperature=0.0, max_tokens=60)
NGRAM, EAGLE = common_pb2.ALGORITHM_NGRAM, common_pb2.ALGORITHM_EAGLE
TOKEN, OTHER = "an-operators-own-token", "a-service's-own-token"


@asynccontextmanager
async def administered(service: Service, args: VerifyArgs | None = None) -> AsyncIterator[str]:
    """AdminService of a running engine on a socket of its own."""
    args = args or VerifyArgs(listen=f"{service.address}-admin")
    tokens = TokenFile(args.admin_token_file, "--admin-token-file") if args.admin_token_file else None
    server = serving.create_server(args, apart=[(PATH, tokens)])
    admin_pb2_grpc.add_AdminServiceServicer_to_server(
        AdminServicer(service.inbox, service.engine.drafters, has_token=tokens is not None), server
    )
    (address,) = serving.listen(server, args, args.listen)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


def stub_of(channel: grpc.aio.Channel) -> admin_pb2_grpc.AdminServiceAsyncStub:
    return cast("admin_pb2_grpc.AdminServiceAsyncStub", admin_pb2_grpc.AdminServiceStub(channel))


@pytest.mark.asyncio
async def test_a_disabled_drafter_loses_its_sessions_to_others_in_the_middle_of_them(serve: Serve) -> None:
    service = await serve(MODEL)
    async with administered(service) as address, rpc.create_channel(address) as channel:
        stub = stub_of(channel)
        first = await service.draft(perfect(Truth([TEXT])), name="first")
        service.gate.close(3)
        task = asyncio.create_task(service.generate(request(PROMPT, LONG)))
        await service.gate.at_step()
        second = await service.draft(perfect(Truth([TEXT])), name="second")
        await service.gate.pass_steps(1)
        taken_on = service.drafter(second)
        assert taken_on is not None
        taken_on.replies.mean_ms = 1e12  # it is waited for, however busy the machine is
        change = asyncio.ensure_future(
            stub.SetDrafterMode(pb.SetDrafterModeRequest(drafter_id="first", mode=pb.DRAFTER_MODE_DISABLED))
        )
        await service.inbox.until(lambda: service.inbox.kinds.count(Ask) == 1)
        service.gate.open()
        assert tokens_of(await task) == OUTPUT[:60]
        response = await change
        assert response.moved_sessions == 1
        assert response.drafter.mode == pb.DRAFTER_MODE_DISABLED
        for drafter in (first, second):
            await drafter.until(lambda drafter=drafter: drafter.view.closed)
        assert first.view.num_accepted < 60
        assert any(round.opened for round in second.rounds)
        found = await stub.ListDrafters(pb.ListDraftersRequest())
        assert [(d.drafter_id, d.mode, d.sessions) for d in found.drafters] == [
            ("first", pb.DRAFTER_MODE_DISABLED, 0), ("second", pb.DRAFTER_MODE_ENABLED, 0)
        ]  # fmt: skip
        assert found.drafters[1].accepted_tokens > 0

        await stub.SetDrafterMode(pb.SetDrafterModeRequest(drafter_id="second", mode=pb.DRAFTER_MODE_DRAINING))
        seen = len(first.rounds), len(second.rounds)
        assert tokens_of(await service.generate(request(PROMPT, LONG))) == OUTPUT[:60]
        assert (len(first.rounds), len(second.rounds)) == seen  # nobody was told of it
        await stub.SetDrafterMode(pb.SetDrafterModeRequest(drafter_id="first", mode=pb.DRAFTER_MODE_ENABLED))
        assert tokens_of(await service.generate(request(PROMPT, LONG))) == OUTPUT[:60]
        await first.until(lambda: len(first.rounds) > seen[0])
        await service.draft(perfect(Truth([TEXT])), name="second")  # as after a broken stream
        found = await stub.ListDrafters(pb.ListDraftersRequest())
        assert [d.mode for d in found.drafters] == [
            pb.DRAFTER_MODE_ENABLED, pb.DRAFTER_MODE_DRAINING, pb.DRAFTER_MODE_DRAINING
        ]  # fmt: skip


@pytest.mark.asyncio
async def test_calls_that_wait_for_the_engine_are_bounded(serve: Serve) -> None:
    service = await serve(MODEL)
    async with administered(service) as address, rpc.create_channel(address) as channel:
        stub = stub_of(channel)
        service.gate.close(0)
        task = asyncio.create_task(service.generate(request(PROMPT, LONG)))
        await service.gate.at_step()
        waiting = [asyncio.ensure_future(stub.ListDrafters(pb.ListDraftersRequest())) for _ in range(MAX_CALLS)]
        await service.inbox.until(lambda: service.inbox.kinds.count(Ask) == MAX_CALLS)
        waiting.pop().cancel()  # the engine has it all the same
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ListDrafters(pb.ListDraftersRequest())
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        service.gate.open()
        await asyncio.gather(task, *waiting)
        await stub.ListDrafters(pb.ListDraftersRequest())


@pytest.mark.asyncio
async def test_an_algorithm_is_switched_for_those_that_come_later_too(serve: Serve) -> None:
    service = await serve(MODEL)
    async with administered(service) as address, rpc.create_channel(address) as channel:
        stub = stub_of(channel)
        await stub.SetAlgorithm(pb.SetAlgorithmRequest(algorithm=NGRAM, enabled=False))
        drafter = await service.draft(perfect(Truth([TEXT])))
        assert tokens_of(await service.generate(request(PROMPT, LONG))) == OUTPUT[:60]
        assert drafter.rounds == []
        found = await stub.ListDrafters(pb.ListDraftersRequest())
        assert list(found.disabled_algorithms) == [NGRAM]
        await stub.SetAlgorithm(pb.SetAlgorithmRequest(algorithm=EAGLE, enabled=False))
        await stub.SetAlgorithm(pb.SetAlgorithmRequest(algorithm=NGRAM, enabled=True))
        assert tokens_of(await service.generate(request(PROMPT, LONG))) == OUTPUT[:60]
        await drafter.until(lambda: drafter.rounds)


@pytest.mark.asyncio
async def test_nonsense_is_refused(serve: Serve) -> None:
    service = await serve(MODEL)
    async with administered(service) as address, rpc.create_channel(address) as channel:
        stub = stub_of(channel)
        unknown = pb.SetDrafterModeRequest(drafter_id="nobody", mode=pb.DRAFTER_MODE_ENABLED)
        assert isinstance(await error_of(stub.SetDrafterMode(unknown)), NotFound)
        assert isinstance(await error_of(stub.SetDrafterMode(pb.SetDrafterModeRequest())), InvalidArgument)
        assert isinstance(await error_of(stub.SetAlgorithm(pb.SetAlgorithmRequest(enabled=False))), InvalidArgument)


@pytest.mark.asyncio
async def test_operators_need_their_own_token_or_a_socket(serve: Serve, tmp_path: Path) -> None:
    service = await serve(MODEL)
    ours, theirs = tmp_path / "admin", tmp_path / "services"
    ours.write_text(TOKEN)
    theirs.write_text(OTHER)
    look = pb.ListDraftersRequest()
    listen = VerifyArgs(listen="127.0.0.1:0")
    async with administered(service, listen) as address, rpc.create_channel(address) as channel:
        assert isinstance(await error_of(stub_of(channel).ListDrafters(look)), Unauthenticated)
    guarded = VerifyArgs(listen="127.0.0.1:0", admin_token_file=str(ours), token_file=str(theirs))
    async with administered(service, guarded) as address:
        for path, allowed in ((ours, True), (theirs, False)):
            async with Dialer(tokens=TokenFile(str(path), "--token-file"))(address) as channel:
                if allowed:
                    await stub_of(channel).ListDrafters(look)
                else:
                    assert isinstance(await error_of(stub_of(channel).ListDrafters(look)), Unauthenticated)
