"""Declared metrics, plain histograms, and the listener that tells them, over real sockets."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from outrider import metrics_http
from outrider.errors import StartupError
from outrider.metrics import Buckets, Families, Family, Reading, new_registry, text
from outrider.metrics_http import serve_metrics

FAMILIES = (
    Family("outrider_things_total", "counter", "Things.", ("kind",)),
    Family("outrider_level", "gauge", "A level."),
    Family("outrider_took_seconds", "histogram", "Times."),
)


def told(read: Callable[[Reading], None]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    registry = new_registry()
    registry.register(Families(FAMILIES, read, [("model", "m")]))
    families = text_string_to_metric_families(text(registry).decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_values_come_out_as_they_were_read() -> None:
    times = Buckets([0.1, 1.0])
    for value in (0.05, 0.1, 0.5, 7.0):
        times.observe(value)

    def read(reading: Reading) -> None:
        reading.add("outrider_things_total", 3, "red")
        reading.add("outrider_level", 0.5)
        reading.add_buckets("outrider_took_seconds", times)

    seen = told(read)
    model = ("model", "m")
    assert seen["outrider_things_total", (("kind", "red"), model)] == 3
    assert seen["outrider_level", (model,)] == 0.5
    assert [seen["outrider_took_seconds_bucket", (("le", le), model)] for le in ("0.1", "1.0", "+Inf")] == [2, 3, 4]
    assert seen["outrider_took_seconds_count", (model,)] == 4
    assert seen["outrider_took_seconds_sum", (model,)] == pytest.approx(7.65)


def test_a_name_that_is_not_declared_is_an_error() -> None:
    with pytest.raises(KeyError):
        told(lambda reading: reading.add("outrider_odd", 1))


async def exchange(address: str, sent: bytes) -> bytes:
    host, port = address.removeprefix("http://").removesuffix("/metrics").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    received = await reader.read()
    writer.close()
    return received


@pytest.mark.asyncio
async def test_the_listener_answers_one_path() -> None:
    async with serve_metrics(new_registry(), "127.0.0.1", 0) as address:
        assert address is not None
        whole = await exchange(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert whole.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4")
        assert b"outrider_build_info{" in whole
        assert b"process_resident_memory_bytes" in whole
        head = await exchange(address, b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert head.endswith(b"\r\n\r\n")
        for request, status in [
            (b"GET / HTTP/1.1", b"404"),
            (b"POST /metrics HTTP/1.1", b"405"),
            (b"\x16\x03", b"404"),
        ]:
            assert (await exchange(address, request + b"\r\n\r\n")).split()[1] == status


@pytest.mark.asyncio
async def test_slow_broken_large_and_many_connections_get_nowhere_and_are_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        serve_metrics(new_registry(), "127.0.0.1", 0, timeout_s=0.05) as address,
        serve_metrics(new_registry(), "127.0.0.1", 0, timeout_s=60.0) as patient,
    ):
        assert address is not None
        assert patient is not None
        with capture_logs() as logs:
            assert await exchange(address, b"GET /metrics HTTP/1.1\r\nHo") == b""
            assert await exchange(patient, b"GET /metrics HTTP/1.1\r\nx: " + b"y" * 40_000) == b""
        assert [log["event"] for log in logs] == ["metrics: no whole request in time", "metrics: no whole request"]
        assert all(re.fullmatch(r"127\.0\.0\.1:\d+", log["peer"]) for log in logs)
        monkeypatch.setattr(metrics_http, "MAX_CONNECTIONS", 0)
        with capture_logs() as logs:
            assert await exchange(address, b"") == b""
        assert [log["event"] for log in logs] == ["too many connections for metrics"]


@pytest.mark.asyncio
async def test_no_port_no_listener_and_a_taken_one_is_told() -> None:
    async with serve_metrics(new_registry(), "127.0.0.1", None) as address:
        assert address is None
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"--metrics-port {port}"):
            async with serve_metrics(new_registry(), "127.0.0.1", port):
                pass
