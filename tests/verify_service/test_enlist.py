"""Who may draft: what enlisting tells, and what it refuses."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from outrider import rpc
from outrider.errors import FailedPrecondition, InvalidArgument, OutriderError, ResourceExhausted
from outrider.row_ring import host_id
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import WIRE_VERSION
from tests.verify_service.conftest import FINGERPRINT, Serve, Service, layout, tokens_of
from tests.verify_service.held import MODEL, OUTPUT, PROMPT
from tests.verify_service.rig import request
from verify_service import service as service_module
from verify_service import speculate
from verify_service.commands import DrafterLeft


class Told(asyncio.Queue[verify_pb2.SpeculateResponse]):
    """A call's context that keeps what is written to it. gone: its peer is, so that writing fails."""

    def __init__(self, *, gone: bool = False) -> None:
        super().__init__()
        self._gone = gone

    def peer(self) -> str:
        return "unix:"

    async def write(self, frame: verify_pb2.SpeculateResponse) -> None:
        await self.put(frame)
        if self._gone:
            raise ConnectionError("nobody reads")


async def refusal(service: Service, **settings: Any) -> OutriderError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.draft(**settings)
    return rpc.error_from_rpc(caught.value)


@pytest.mark.asyncio
async def test_who_enlists_is_told_the_target_and_its_own_limits(serve: Serve) -> None:
    service = await serve(MODEL, max_proposal_nodes=20, max_verify_nodes=9, max_running_requests=4)
    fake = await service.draft(target=common_pb2.ModelInfo(vocab_fingerprint=FINGERPRINT, vocab_size=32))
    enlisted = fake.enlisted
    assert enlisted.target.vocab_size == 32
    assert enlisted.features.kind == common_pb2.FEATURE_KIND_NONE
    assert enlisted.limits == verify_pb2.DrafterLimits(
        max_proposal_nodes=20,
        max_assumed_tokens=64,
        max_proposals_per_session=8,
        drafter_outbox_bytes=8 * 2**20,
        max_sessions=4,
        max_verify_nodes=9,
    )
    info = await service.stub.GetServerInfo(verify_pb2.VerifyServiceGetServerInfoRequest())
    assert enlisted.boot_id == info.boot_id
    assert [state.drafter_id for state in info.drafters] == ["fake-0"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("settings", "field", "values"),
    [
        ({"wire_version": WIRE_VERSION + 1}, "wire_version", (WIRE_VERSION, WIRE_VERSION + 1)),
        ({"target": common_pb2.ModelInfo(vocab_fingerprint="else")}, "target.vocab_fingerprint", (FINGERPRINT, "else")),
        ({"target": common_pb2.ModelInfo(vocab_size=33)}, "target.vocab_size", (32, 33)),
        ({"target": common_pb2.ModelInfo(hidden_size=9), "features": layout(8)}, "target.hidden_size", (8, 9)),
        (
            {
                "target": common_pb2.ModelInfo(hidden_size=8),
                "features": common_pb2.FeatureLayout(kind=common_pb2.FEATURE_KIND_AUX, aux_layers=[1]),
            },
            "features.kind",
            ("FEATURE_KIND_LAST", "FEATURE_KIND_AUX"),
        ),
        (
            {
                "target": common_pb2.ModelInfo(hidden_size=8),
                "features": common_pb2.FeatureLayout(kind=common_pb2.FEATURE_KIND_LAST, width=24),
            },
            "features.width",
            (8, 24),
        ),
        (
            {
                "target": common_pb2.ModelInfo(hidden_size=8),
                "features": common_pb2.FeatureLayout(
                    kind=common_pb2.FEATURE_KIND_LAST, dtype=common_pb2.DTYPE_BFLOAT16
                ),
            },
            "features.dtype",
            ("DTYPE_FLOAT32", "DTYPE_BFLOAT16"),
        ),
        (
            {
                "target": common_pb2.ModelInfo(hidden_size=8),
                "features": common_pb2.FeatureLayout(kind=common_pb2.FEATURE_KIND_LAST, dtype=77),  # type: ignore[arg-type]
            },
            "features.dtype",
            ("DTYPE_FLOAT32", 77),
        ),
    ],
)
async def test_who_does_not_fit_is_refused_with_both_values(
    serve: Serve, settings: dict[str, Any], field: str, values: tuple[object, object]
) -> None:
    service = await serve(MODEL, feature_width=8)
    error = await refusal(service, **settings)
    assert isinstance(error, FailedPrecondition)
    assert error.field == f"enlist.{field}"
    for value in values:
        assert repr(value) in error.message
    assert tokens_of(await service.generate(request(PROMPT))) == OUTPUT[:20]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("kind", "layers", "flag"),
    [(common_pb2.FEATURE_KIND_AUX, [2, 15, 27], "aux:2,15,27"), (common_pb2.FEATURE_KIND_LAST, [], "last")],
)
async def test_who_needs_other_features_is_told_the_flag(
    serve: Serve, kind: common_pb2.FeatureKind, layers: list[int], flag: str
) -> None:
    service = await serve(MODEL)
    error = await refusal(
        service, target=common_pb2.ModelInfo(hidden_size=8),
        features=common_pb2.FeatureLayout(kind=kind, aux_layers=layers),
    )  # fmt: skip
    assert isinstance(error, FailedPrecondition)
    assert error.message.endswith(f"; start verify with --features {flag}")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"algorithm": common_pb2.ALGORITHM_UNSPECIFIED}, "enlist.algorithm"),
        ({"algorithm": 77}, "enlist.algorithm"),
        ({"name": ""}, "enlist.drafter_id"),
        ({"name": "x" * 257}, "enlist.drafter_id"),
        ({"max_sessions": 0}, "enlist.max_sessions"),
        ({"draft_model": "x" * 257}, "enlist.draft_model"),
        ({"host": "x" * 257}, "enlist.host_id"),
    ],
)
async def test_nonsense_in_enlist_is_named(serve: Serve, settings: dict[str, Any], field: str) -> None:
    service = await serve(MODEL)
    error = await refusal(service, **settings)
    assert isinstance(error, InvalidArgument)
    assert error.field == field


@pytest.mark.asyncio
async def test_who_says_nothing_is_told_what_was_waited_for(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculate, "ENLIST_TIMEOUT_S", 0.05)
    service = await serve(MODEL)
    call = cast(Any, service.stub).Speculate()
    with pytest.raises(grpc.aio.AioRpcError, match=r"no `enlist` came in 0\.05 s") as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.asyncio
async def test_a_value_too_long_for_a_status_is_cut_and_the_status_stays(serve: Serve) -> None:
    service = await serve(MODEL, feature_width=8)
    for target in (
        common_pb2.ModelInfo(vocab_fingerprint="x" * 2**20),
        common_pb2.ModelInfo(vocab_fingerprint="\u00e4" * 2**20),
    ):
        error = await refusal(service, target=target)
        assert isinstance(error, FailedPrecondition)
        assert error.field == "enlist.target.vocab_fingerprint"
        assert repr(FINGERPRINT) in error.message
    layers = common_pb2.FeatureLayout(kind=common_pb2.FEATURE_KIND_LAST, aux_layers=range(100_000))
    error = await refusal(service, target=common_pb2.ModelInfo(hidden_size=8), features=layers)
    assert isinstance(error, FailedPrecondition)
    assert error.field == "enlist.features.aux_layers"


@pytest.mark.asyncio
async def test_so_many_drafters_and_no_more(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_DRAFTERS", 2)
    service = await serve(MODEL)
    first, _ = [await service.draft() for _ in range(2)]
    error = await refusal(service)
    assert isinstance(error, ResourceExhausted)
    assert "2 drafters are enlisted; at most 2 may be" in error.message
    await first.close()
    await service.inbox.until(lambda: DrafterLeft in service.inbox.kinds)
    await service.draft(name="next")


@pytest.mark.asyncio
async def test_a_kind_of_features_that_there_is_not_is_named(serve: Serve) -> None:
    service = await serve(MODEL, feature_width=8)
    features = common_pb2.FeatureLayout(kind=cast(Any, 99))
    error = await refusal(service, target=common_pb2.ModelInfo(hidden_size=8), features=features)
    assert isinstance(error, InvalidArgument)
    assert error.field == "enlist.features.kind"
    assert "99" in error.message


@pytest.mark.asyncio
async def test_of_those_that_wait_to_enlist_no_more_are_taken_than_may_be(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "MAX_DRAFTERS", 1)
    service = await serve(MODEL)
    enlist = verify_pb2.Enlist(
        drafter_id="one", wire_version=WIRE_VERSION, algorithm=common_pb2.ALGORITHM_NGRAM, max_sessions=1
    )
    together = asyncio.Event()

    async def requests() -> AsyncIterator[verify_pb2.SpeculateRequest]:
        await together.wait()
        yield verify_pb2.SpeculateRequest(enlist=enlist)
        await asyncio.Event().wait()

    told = Told()
    streams = [asyncio.create_task(service.servicer.Speculate(requests(), cast(Any, told))) for _ in range(3)]
    await asyncio.sleep(0)
    together.set()
    refused, (taken,) = await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
    while len(refused) < 2:
        refused, (taken,) = await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
    assert {type(stream.exception()) for stream in refused} == {ResourceExhausted}
    assert (await told.get()).HasField("enlisted")
    assert told.empty()
    taken.cancel()
    await asyncio.wait([taken])


@pytest.mark.asyncio
async def test_a_drafter_that_leaves_before_it_is_told_anything_leaves_no_memory_behind(serve: Serve) -> None:
    service = await serve(MODEL, feature_width=8)
    enlist = verify_pb2.Enlist(
        drafter_id="brief", wire_version=WIRE_VERSION, algorithm=common_pb2.ALGORITHM_EAGLE, max_sessions=1,
        features=layout(8), host_id=host_id(), target=common_pb2.ModelInfo(hidden_size=8),
    )  # fmt: skip

    async def requests() -> AsyncIterator[verify_pb2.SpeculateRequest]:
        yield verify_pb2.SpeculateRequest(enlist=enlist)

    told = Told(gone=True)
    with pytest.raises(ConnectionError):
        await service.servicer.Speculate(requests(), cast(Any, told))
    name = told.get_nowait().enlisted.shared_memory.name
    assert name
    assert name not in os.listdir("/dev/shm")


@pytest.mark.asyncio
async def test_enlist_comes_first_and_once_and_every_frame_carries_something(serve: Serve) -> None:
    service = await serve(MODEL)
    proposals_first = verify_pb2.SpeculateRequest(proposals=verify_pb2.Proposals())
    call = service.stub.Speculate(iter([proposals_first]))
    with pytest.raises(grpc.aio.AioRpcError, match="the first frame must be `enlist`"):
        await call.read()
    call = service.stub.Speculate(iter([]))
    with pytest.raises(grpc.aio.AioRpcError, match="the stream ended before `enlist`"):
        await call.read()
    for frame, message in (
        (verify_pb2.SpeculateRequest(enlist=verify_pb2.Enlist()), "`enlist` may only be the first frame"),
        (verify_pb2.SpeculateRequest(), "a frame must carry a message"),
    ):
        fake = await service.draft()
        fake.send_frame(frame)
        error = await fake.finished()
        assert error is not None
        assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, message)


@pytest.mark.asyncio
async def test_who_never_enlists_is_not_waited_for_for_ever(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculate, "ENLIST_TIMEOUT_S", 0.01)
    service = await serve(MODEL)

    async def nothing() -> AsyncIterator[verify_pb2.SpeculateRequest]:
        await asyncio.Event().wait()
        yield verify_pb2.SpeculateRequest()

    call = service.stub.Speculate(nothing())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
