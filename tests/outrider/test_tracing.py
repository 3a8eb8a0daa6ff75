"""Spans, their context on the wire, and who decides whether a request is traced."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

from outrider import tracing as tracing_module
from outrider.args import DraftArgs, GatewayArgs, VerifyArgs
from outrider.args.observing import ObservingArgs
from outrider.errors import StartupError
from outrider.tracing import call_metadata, metadata_value, set_call_metadata, tracing_of
from tests.otlp import collecting

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = SAMPLED[:-1] + "0"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing_module, "_CLOSE_S", 60.0)  # a busy machine may take longer than a service has


@pytest.mark.asyncio
async def test_spans_arrive_below_one_another() -> None:
    with collecting() as collector:
        tracing = tracing_of(
            VerifyArgs(otlp_traces_endpoint=collector.endpoint, otlp_traces_sample_ratio=1.0), "verify"
        )
        assert tracing is not None
        span = tracing.start("outer")
        start_ns = time.monotonic_ns()
        tracing.record("inner", tracing.traceparent(span), start_ns, start_ns + 5_000_000, {"outrider.nodes": 3})
        span.end()
        await tracing.close()
        (outer,), (inner,) = collector.named("outer"), collector.named("inner")
    assert outer.service == "outrider-verify"
    assert (inner.trace_id, inner.parent_id) == (outer.trace_id, outer.span_id)
    assert inner.end_ns - inner.start_ns == 5_000_000
    assert abs(inner.start_ns - time.time_ns()) < 600e9  # a time of day
    assert inner.attributes == {"outrider.nodes": 3}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("ratio", "traceparent", "recorded"),
    [(1.0, "", True), (0.0, "", False), (0.0, SAMPLED, True), (1.0, UNSAMPLED, False), (1.0, "nonsense", True)],
)
async def test_the_caller_decides_then_the_share(ratio: float, traceparent: str, recorded: bool) -> None:
    with collecting() as collector:
        tracing = tracing_of(
            DraftArgs(otlp_traces_endpoint=collector.endpoint, otlp_traces_sample_ratio=ratio), "draft"
        )
        assert tracing is not None
        span = tracing.start("request", traceparent)
        assert span.is_recording() is recorded
        sent = tracing.traceparent(span)
        assert bool(int(sent[-2:], 16) & 1) is recorded  # those behind keep to it
        if traceparent.startswith("00-"):
            assert sent.split("-")[1] == traceparent.split("-")[1]
        span.end()
        await tracing.close()
    assert bool(collector.spans) is recorded


@pytest.mark.parametrize("hurried", [True, False])
@pytest.mark.asyncio
async def test_a_collector_that_never_answers_is_not_waited_for(hurried: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hurried:
        monkeypatch.setattr(tracing_module, "_CLOSE_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        tracing = tracing_of(VerifyArgs(otlp_traces_endpoint=endpoint, otlp_traces_sample_ratio=1.0), "verify")
        assert tracing is not None
        tracing.start("request").end()
        hurry = asyncio.Event()
        if hurried:
            hurry.set()
        await tracing.close(hurry)
        (closing,) = (thread for thread in threading.enumerate() if thread.name == "closes tracing")
        taken, _ = silent.accept()
        with taken:
            taken.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            closing.join()


def test_off_is_nothing() -> None:
    for args in (VerifyArgs(), DraftArgs(), GatewayArgs()):
        assert tracing_of(args, "x") is None
    assert call_metadata() == ()


def test_what_calls_send_along() -> None:
    set_call_metadata("r1", "")
    assert call_metadata() == (("x-request-id", "r1"),)
    set_call_metadata("r1", SAMPLED)
    assert metadata_value(call_metadata(), "traceparent") == SAMPLED
    assert metadata_value(call_metadata(), "other") == ""
    assert len(metadata_value((("k", "v" * 1000),), "k")) == 256


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ({"otlp_traces_endpoint": "host:4317"}, "--otlp-traces-endpoint"),
        ({"otlp_traces_endpoint": "http://x", "otlp_traces_sample_ratio": 2.0}, "--otlp-traces-sample-ratio"),
        ({"otlp_traces_sample_ratio": 0.5}, "needs --otlp-traces-endpoint"),
        ({"metrics_port": 70_000}, "--metrics-port"),
    ],
)  # fmt: skip
def test_nonsense_is_refused(flags: dict[str, object], flag: str) -> None:
    for kind in (VerifyArgs, DraftArgs, GatewayArgs):
        assert issubclass(kind, ObservingArgs)
        with pytest.raises(StartupError, match=flag):
            kind(**flags)  # pyright: ignore[reportArgumentType]
