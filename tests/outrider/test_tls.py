"""A gRPC server's certificates: many handshakes at once, and renewal."""

from __future__ import annotations

import asyncio
import math
import os
import resource
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs

from outrider import dialing
from outrider.dialing import DialledChannel
from outrider.rpc import bind, create_server
from outrider.tls import TlsFiles, http_context, server_credentials
from tests.certificates import Authority

_CALLERS, _HANDSHAKES = 16, 100  # each; enough to crash a server that hands gRPC its certificates anew at every one


def certificates_shown(port: int, times: int) -> set[str]:
    return {ssl.get_server_certificate(("127.0.0.1", port), timeout=60) for _ in range(times)}


@pytest.mark.asyncio
async def test_handshakes_beside_one_another_and_a_renewal(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = TlsFiles(*authority.issue("localhost", "127.0.0.1"), None)
    server = create_server()
    port = int(bind(server, "127.0.0.1:0", server_credentials(files)).rpartition(":")[2])
    await server.start()
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(_CALLERS) as callers:

        async def shown(times: int, num_callers: int = _CALLERS) -> set[str]:
            calls = (loop.run_in_executor(callers, certificates_shown, port, times) for _ in range(num_callers))
            return set().union(*await asyncio.gather(*calls))

        before = await shown(_HANDSHAKES)
        authority.issue("localhost", "127.0.0.1")
        await shown(1, num_callers=1)  # the handshake that sees the change
        after = await shown(1)
    await server.stop(None)
    assert len(before) == len(after) == 1
    assert before != after


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_certificates_that_cannot_be_read_fill_no_log(
    tmp_path: Path, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = TlsFiles(*Authority(tmp_path).issue("localhost"), None)
    handshakes: list[Callable[[], object]] = []
    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", lambda _, look, **__: handshakes.append(look))
    if protocol == "grpc":
        server_credentials(files)
    else:
        choose: Any = http_context(files).sni_callback
        handshakes.append(lambda: choose(SimpleNamespace(), None, None))
    (shake_hands,) = handshakes
    assert files.certfile is not None
    Path(files.certfile).write_text("half a certif")
    with capture_logs() as logs:
        for _ in range(50):
            shake_hands()
    assert [line["event"] for line in logs] == ["certificates cannot be read; those before stay"]


@pytest.mark.asyncio
async def test_a_client_tries_files_that_cannot_be_used_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialing, "_RETRY_S", math.inf)
    files = TlsFiles(*Authority(tmp_path).issue("gateway"), None)
    certificate = Path(files.certfile or "")
    whole, num_opened = certificate.read_text(), 0  # noqa: ASYNC240

    def open_channel() -> grpc.aio.Channel:
        nonlocal num_opened
        num_opened += 1
        files.read()
        return grpc.aio.insecure_channel("localhost:1")

    async with DialledChannel(open_channel, files, None) as channel:
        first = channel.current()
        certificate.write_text("half a certif")  # noqa: ASYNC240
        when = certificate.stat().st_mtime_ns  # noqa: ASYNC240
        with capture_logs() as logs:
            assert all(channel.current() is first for _ in range(50))
        assert [line["event"] for line in logs] == ["certificates cannot be read; those before stay"]
        assert num_opened == 2
        certificate.write_text(whole)  # noqa: ASYNC240
        os.utime(certificate, ns=(when, when))  # as after a chmod
        assert channel.current() is not first
        assert num_opened == 3
        certificate.unlink()  # noqa: ASYNC240
        with capture_logs() as logs:
            channel.current()
        assert logs == []  # within the minute


@pytest.mark.asyncio
async def test_a_client_gets_by_a_fault_that_is_not_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialing, "_RETRY_S", 0.0)
    files = TlsFiles(*Authority(tmp_path).issue("gateway"), None)
    certificate = Path(files.certfile or "")

    def open_channel() -> grpc.aio.Channel:
        files.read()
        return grpc.aio.insecure_channel("localhost:1")

    async with DialledChannel(open_channel, files, None) as channel:
        first = channel.current()
        certificate.write_bytes(certificate.read_bytes())  # noqa: ASYNC240
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            assert channel.current() is first
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        second = channel.current()
        assert second is not first
        assert channel.current() is second
