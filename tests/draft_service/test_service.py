"""DraftService over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_service.app import SERVICE
from draft_service.drafters.base import Draft, TextRequest
from draft_service.drafters.ngram import NgramDrafter
from draft_service.drafting import Drafting
from draft_service.link import Identity
from draft_service.service import MAX_CALLS, DraftServicer
from draft_service.worker import Worker
from outrider import __version__, rpc
from outrider.args import DraftArgs
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from outrider.wire import pack_ids, unpack_ids
from tests.draft_service.fake_verify import FakeVerify, opened
from tests.polling import until_async

pytestmark = pytest.mark.asyncio


@dataclass(frozen=True)
class Serving:
    stub: draft_pb2_grpc.DraftServiceAsyncStub
    channel: grpc.aio.Channel
    worker: Worker
    drafter: NgramDrafter

    async def propose(self, tokens: list[int], **fields: Any) -> tuple[list[int], list[int]]:
        response = await self.stub.Propose(draft_pb2.ProposeRequest(tokens=pack_ids(tokens), **fields))
        assert len(response.scores) * 4 == len(response.tokens)
        return unpack_ids(response.tokens, field="t").tolist(), unpack_ids(response.parents, field="p").tolist()

    async def add(self, *messages: draft_pb2.AddCorpusRequest) -> draft_pb2.AddCorpusResponse:
        async def requests() -> AsyncIterator[draft_pb2.AddCorpusRequest]:
            for message in messages:
                yield message

        return await self.stub.AddCorpus(requests())


@asynccontextmanager
async def serving(folder: Path, *addresses: str, **flags: Any) -> AsyncIterator[Serving]:
    small: dict[str, Any] = {"speculative_ngram_capacity": 50_000, "verify_address": addresses}
    args = DraftArgs(**(small | flags))
    drafter = NgramDrafter.from_args(args)
    identity = Identity("host:1", "host", "boot")
    worker = Worker(addresses, Drafting(drafter), identity, max_sessions=4)
    running = asyncio.create_task(worker.run())
    server = rpc.create_server()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(DraftServicer(args, drafter, worker, identity), server)
    health = rpc.add_health_and_reflection(server, [SERVICE])
    address = rpc.bind(server, f"unix:{folder}/draft.sock")
    await server.start()
    rpc.set_serving(health, [SERVICE], True)
    try:
        async with rpc.create_channel(address) as channel:
            yield Serving(draft_pb2_grpc.DraftServiceStub(channel), channel, worker, drafter)
    finally:
        running.cancel()
        await worker.drain(0)
        await server.stop(None)
        drafter.close_down()


def text(*tokens: int, **fields: Any) -> draft_pb2.AddCorpusRequest:
    return draft_pb2.AddCorpusRequest(tokens=pack_ids(tokens), **fields)


async def test_a_text_is_continued(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        assert await service.propose([1, 2, 3, 1, 4, 1]) == ([4, 2, 1, 3, 1, 4, 1], [-1, -1, 0, 1, 3, 4, 5])
        wish = common_pb2.SpeculativeParams(num_draft_tokens=2)
        assert await service.propose([1, 2, 3, 1, 4, 1], speculative=wish) == ([4], [-1])
        assert await service.propose([1]) == ([], [])
        assert await service.propose([1], prediction_tokens=pack_ids([1, 2])) == ([2], [-1])


async def test_a_corpus_is_drawn_from_within_its_scope(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        response = await service.add(text(1, 2, 3, corpus_id="all"), text(5, 6))
        assert response.tokens_added == 5
        assert response.nodes_used == 1 + 5 + 2  # root, 1 12 123 2 23, 5 56
        await service.add(text(1, 9, corpus_id="mine", corpus_scope="me"))
        assert await service.propose([1]) == ([2, 3], [-1, 0])
        assert await service.propose([3]) == ([], [])  # texts are not joined
        assert await service.propose([1], corpus_scope="me") == ([9, 2, 3], [-1, -1, 1])


async def test_a_stream_adds_to_one_corpus(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        first = text(1, 2, corpus_id="mine", corpus_scope="me")
        await service.add(first, text(3, 4), text(5, 6, corpus_id="mine", corpus_scope="me"))
        for field, other in (("corpus_id", text(7, 8, corpus_id="else")), ("corpus_scope", text(7, corpus_scope="x"))):
            with pytest.raises(grpc.aio.AioRpcError, match=f"{field} differs from the first") as failure:
                await service.add(first, other)
            assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        info = await service.stub.GetServerInfo(draft_pb2.DraftServiceGetServerInfoRequest())
        assert [(one.corpus_id, one.tokens) for one in info.corpora] == [("mine", 10)]


async def test_bytes_that_are_no_message_are_refused_and_fill_no_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    no_utf8 = bytes([0x2A, 1, 0xFF])  # field 5, corpus_scope
    async with serving(tmp_path) as service:
        capfd.readouterr()
        for method, data in (("Propose", b"\xff\xff\xff"), ("Propose", no_utf8), ("RemoveCorpus", b"\xff")):
            call = service.channel.unary_unary(f"/{SERVICE}/{method}", None, None)(data)
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "no message of this method" in await call.details()
        call = service.channel.stream_unary(f"/{SERVICE}/AddCorpus", None, None)(iter([b"\xff\xff\xff"]))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "".join(capfd.readouterr()) == ""


async def test_a_corpus_is_taken_out_by_its_id(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await service.add(text(1, 2, 3, corpus_id="one"), text(5, 6))
        await service.add(text(1, 4, corpus_id="two", corpus_scope="me"))
        info = await service.stub.GetServerInfo(draft_pb2.DraftServiceGetServerInfoRequest())
        assert [(one.corpus_id, one.corpus_scope, one.tokens) for one in info.corpora] == [
            ("one", "", 5), ("two", "me", 2),
        ]  # fmt: skip
        removed = await service.stub.RemoveCorpus(draft_pb2.RemoveCorpusRequest(corpus_id="one"))
        assert removed.tokens_removed == 5
        assert await service.propose([1], corpus_scope="me") == ([4], [-1])
        for fields, code in (
            ({"corpus_id": "one"}, grpc.StatusCode.NOT_FOUND),
            ({"corpus_id": "two"}, grpc.StatusCode.NOT_FOUND),
            ({}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"corpus_id": "two", "corpus_scope": "x" * 257}, grpc.StatusCode.INVALID_ARGUMENT),
        ):
            call = service.stub.RemoveCorpus(draft_pb2.RemoveCorpusRequest(**fields))
            assert await call.code() is code
        await service.stub.RemoveCorpus(draft_pb2.RemoveCorpusRequest(corpus_id="two", corpus_scope="me"))
        info = await service.stub.GetServerInfo(draft_pb2.DraftServiceGetServerInfoRequest())
        assert not info.corpora


async def test_a_corpus_whose_caller_goes_goes_in_and_out_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draft_service.service.MAX_CALLS", 1)
    async with serving(tmp_path) as service:
        corpus, corpora = service.drafter.corpus, service.drafter.corpora

        async def given_up(call: Any, *, comes: bool) -> None:
            await until_async(lambda: bool(corpora.sizes()) == comes, "the corpus stays as it was", pause_s=0)
            call.cancel()
            assert await call.code() is grpc.StatusCode.CANCELLED

        async def one_text() -> AsyncIterator[draft_pb2.AddCorpusRequest]:
            yield text(5, 6, 7, 8, corpus_id="one")
            await asyncio.Event().wait()

        with corpus._lock:  # what is queued waits
            await given_up(service.stub.AddCorpus(one_text()), comes=True)
            with pytest.raises(grpc.aio.AioRpcError, match="1 AddCorpus calls are under way"):
                await service.add(text(1, 2, corpus_id="two"))  # nor does it make room for another
        await asyncio.to_thread(corpus.flush)
        assert (await service.propose([5, 6]))[0][:1] == [7]
        with corpus._lock:
            await given_up(service.stub.RemoveCorpus(draft_pb2.RemoveCorpusRequest(corpus_id="one")), comes=False)
        await asyncio.to_thread(corpus.flush)
        assert corpus.num_nodes == 0
        assert (await service.add(text(5, 9, corpus_id="one"))).tokens_added == 2
        assert await service.propose([5]) == ([9], [-1])


async def test_a_drafter_with_a_model_has_no_corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as service:
        monkeypatch.setattr(service.drafter, "corpora", None)
        with pytest.raises(grpc.aio.AioRpcError, match="only NGRAM draws from a corpus") as failure:
            await service.add(text(1, 2, corpus_id="one"))
        assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED
        call = service.stub.RemoveCorpus(draft_pb2.RemoveCorpusRequest(corpus_id="one"))
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
        info = await service.stub.GetServerInfo(draft_pb2.DraftServiceGetServerInfoRequest())
        assert (info.corpus_nodes, len(info.corpora)) == (0, 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tokens": b""}, ["tokens", "0", "1"]),
        ({"tokens": b"abc"}, ["tokens", "3 bytes"]),
        ({"tokens": pack_ids([1, -5])}, ["tokens[1]", "-5"]),
        ({"tokens": pack_ids([1] * 262_145)}, ["tokens", "262145", "262144"]),
        ({"prediction_tokens": pack_ids([-1])}, ["prediction_tokens[0]", "-1"]),
        ({"corpus_scope": "x" * 257}, ["corpus_scope", "257", "256"]),
        ({"speculative": common_pb2.SpeculativeParams(num_steps=0)}, ["speculative.num_steps", "0", "1 to 256"]),
        ({"speculative": common_pb2.SpeculativeParams(topk=5000)}, ["speculative.topk", "5000", "256"]),
        ({"speculative": common_pb2.SpeculativeParams(num_draft_tokens=1)}, ["num_draft_tokens", "1", "2 to 256"]),
        ({"speculative": common_pb2.SpeculativeParams(num_steps=256, topk=5)}, ["num_steps times", "1280", "1024"]),
        (
            {"speculative": common_pb2.SpeculativeParams(algorithm="ALGORITHM_EAGLE")},
            ["speculative.algorithm", "ALGORITHM_NGRAM"],
        ),
    ],
)
async def test_wrong_requests_are_refused(tmp_path: Path, fields: dict[str, Any], words: list[str]) -> None:
    async with serving(tmp_path) as service:
        tokens: dict[str, Any] = {"tokens": pack_ids([1])}
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await service.stub.Propose(draft_pb2.ProposeRequest(**(tokens | fields)))
        error = rpc.error_from_rpc(failure.value)
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert all(word in error.message for word in words)
        assert error.field is not None
        assert await service.propose([1, 2, 1]) == ([2, 1], [-1, 0])


@pytest.mark.parametrize(
    ("messages", "code", "word"),
    [
        ([], "INVALID_ARGUMENT", "corpus_id"),
        ([text(1, 2)], "INVALID_ARGUMENT", "corpus_id"),
        ([text(1, 2, corpus_id="x" * 257)], "INVALID_ARGUMENT", "257"),
        ([text(1, corpus_id="x"), text()], "INVALID_ARGUMENT", "tokens"),
        ([text(1, corpus_id="x"), text(*range(20))], "RESOURCE_EXHAUSTED", "at most 10"),
    ],
)
async def test_wrong_corpora_are_refused(tmp_path: Path, messages: list[Any], code: str, word: str) -> None:
    async with serving(tmp_path, speculative_ngram_external_corpus_max_tokens=10) as service:
        with pytest.raises(grpc.aio.AioRpcError, match=word) as failure:
            await service.add(*messages)
        assert failure.value.code().name == code


async def test_calls_beyond_what_may_wait_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as service:
        gate, asked = asyncio.Event(), 0

        async def held(request: TextRequest) -> Draft:
            nonlocal asked
            asked += 1
            await gate.wait()
            return Draft()

        async def silence() -> AsyncIterator[draft_pb2.AddCorpusRequest]:
            await asyncio.Event().wait()
            yield text()

        monkeypatch.setattr(service.drafter, "propose", held)
        wanted = draft_pb2.ProposeRequest(tokens=pack_ids([1]))
        proposes = [service.stub.Propose(wanted) for _ in range(MAX_CALLS)]
        streams = [service.stub.AddCorpus(silence()) for _ in range(MAX_CALLS)]
        await service.stub.GetServerInfo(draft_pb2.DraftServiceGetServerInfoRequest())  # all came before it
        for one_more in (service.stub.Propose(wanted), service.stub.AddCorpus(silence())):
            assert await one_more.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "64" in str(await one_more.details())
        assert asked == 1
        for stream in streams:
            stream.cancel()
        gate.set()
        await asyncio.gather(*proposes)
        assert asked == MAX_CALLS
        await service.stub.Propose(wanted)


async def test_a_corpus_that_stops_in_the_middle_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as service:
        load = service.drafter.corpora.load

        def loading(*text: Any) -> Any:
            monkeypatch.setattr("draft_service.service.CORPUS_IDLE_S", 0.05)  # for what is to come after it
            return load(*text)

        monkeypatch.setattr(service.drafter.corpora, "load", loading)

        async def one_text() -> AsyncIterator[draft_pb2.AddCorpusRequest]:
            yield text(5, 6, 7, 8, corpus_id="half")
            await asyncio.Event().wait()

        call = service.stub.AddCorpus(one_text())
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "0.05 s" in str(await call.details())
        monkeypatch.undo()
        assert (await service.propose([5, 6]))[0][:1] == [7]  # what came stays
        assert (await service.add(text(1, 2, 3, corpus_id="whole"))).tokens_added == 3


async def test_ids_are_held_to_the_targets_vocabulary_once_it_is_known(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/verify.sock"
    async with FakeVerify(address) as verify, serving(tmp_path, address) as service:
        stream = await verify.stream()
        stream.tell(opened=[opened(1, [7, 8, 9], prompt_len=1)])
        await stream.proposals()
        with pytest.raises(grpc.aio.AioRpcError, match="from 0 to 999"):
            await service.propose([1000])
        service.drafter.corpus.flush()
        assert await service.propose([7]) == ([8, 9], [-1, 0])


async def test_server_info_tells_links_and_settings(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/verify.sock"
    async with FakeVerify(address) as verify, serving(tmp_path, address) as service:
        stream = await verify.stream()
        stream.tell(opened=[opened(1, [7, 8, 9], prompt_len=1)])
        await stream.proposals()
        service.drafter.corpus.flush()
        while not service.worker.links[0].stats.proposals:  # noqa: ASYNC110  counted when gRPC says that it was written
            await asyncio.sleep(0)
        info = await service.stub.GetServerInfo(draft_pb2.DraftServiceGetServerInfoRequest())
        assert (info.version, info.wire_version, info.drafter_id) == (__version__, 1, "host:1")
        assert info.algorithm == common_pb2.ALGORITHM_NGRAM
        assert (info.corpus_nodes, info.corpus_capacity) == (6, 50_000)
        assert info.arguments["speculative-ngram-capacity"] == "50000"
        (link,) = info.links
        assert link == draft_pb2.VerifyLink(
            address=address, state=draft_pb2.VERIFY_LINK_STATE_ENLISTED, sessions=1, proposals=1, rounds=1, connects=1
        )


async def test_health_is_served(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        stub = health_pb2_grpc.HealthStub(service.channel)
        response = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert response.status == health_pb2.HealthCheckResponse.SERVING
