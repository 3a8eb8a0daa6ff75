"""The gateway as a process: how it starts, ends, and refuses to start."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from gateway.app import listen, main
from outrider.args import GatewayArgs
from outrider.errors import StartupError
from outrider.serving import check_free
from tests.gateway.conftest import ANSWER
from tests.gateway.fakes import FakeVerify, LoopThread, serving
from tests.gateway.models import byte_level
from tests.image import hiding_all_but
from tests.polling import until

ROOT = Path(__file__).parents[2]
RUN = """
import sys
from gateway.app import main
from outrider.args import GatewayArgs
from outrider.errors import StartupError
try:
    code = main(GatewayArgs.parse(sys.argv[1:]))
except StartupError as error:
    print(error.message, file=sys.stderr)
    code = 2
assert not {"engine", "kernels"} & set(sys.modules)
sys.exit(code)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def verify(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> Generator[tuple[FakeVerify, str, LoopThread]]:
    """A fake, its address, and the loop it runs in."""
    loop = LoopThread()
    answer = [*tokenizer.encode(ANSWER, add_special_tokens=False).ids, 2]
    fake = FakeVerify(folder, tokenizer.get_vocab_size(), say=lambda request, choice: answer)
    server = serving(fake, f"unix:{tmp_path}/verify")
    address = loop.run(server.__aenter__())
    yield fake, address, loop
    loop.run(server.__aexit__(None, None, None))
    loop.close()


@pytest.fixture
def start(tmp_path: Path) -> Generator[Start]:
    """Starts gateways as their image has them, whose errors go to a file, and ends those that a test leaves."""
    script = hiding_all_but("gateway") + RUN
    with ExitStack() as stack:
        errors = stack.enter_context((tmp_path / "errors").open("w"))

        def run(*words: str) -> subprocess.Popen[str]:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", script, *words], stdout=subprocess.PIPE, stderr=errors, text=True,
                    env=environment,
                )
            )  # fmt: skip
            stack.callback(process.kill)
            return process

        yield run


def url_of(process: subprocess.Popen[str]) -> str:
    """The address that the process says it listens on."""
    assert process.stdout is not None
    return process.stdout.readline().split()[-1]


def until_healthy(client: httpx.Client) -> None:
    """Returns when a request would be served."""
    until(lambda: client.get("/health").status_code == 200, "the gateway is not healthy")


def ask(client: httpx.Client, **fields: Any) -> httpx.Response:
    """A chat."""
    return client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], **fields})


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_serves_and_leaves_with_0(
    number: signal.Signals, start: Start, verify: tuple[FakeVerify, str, LoopThread], tmp_path: Path
) -> None:
    process = start("--port=0", f"--verify-address={verify[1]}")
    with httpx.Client(base_url=url_of(process), timeout=30) as client:
        until_healthy(client)
        assert ask(client).json()["choices"][0]["message"]["content"] == ANSWER
    process.send_signal(number)
    assert process.wait(30) == 0
    assert '"asked to stop"' in (tmp_path / "errors").read_text()


def test_a_client_that_goes_on_sending_does_not_hold_it_up(
    start: Start, verify: tuple[FakeVerify, str, LoopThread], tmp_path: Path
) -> None:
    process = start("--port=0", f"--verify-address={verify[1]}", "--max-body-bytes=1000")
    url = url_of(process)
    with httpx.Client(base_url=url) as client:
        until_healthy(client)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
        connection.sendall(head + b"content-length: 50000000\r\n\r\n" + b"x" * 200_000)
        assert connection.recv(12) == b"HTTP/1.1 413"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert "Traceback" not in (tmp_path / "errors").read_text()


def test_connections_beyond_the_limit_of_files_are_refused(
    start: Start, verify: tuple[FakeVerify, str, LoopThread], tmp_path: Path
) -> None:
    """They get 503, not a closed connection; and the log has said so."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (140, before[1]))
    try:
        process = start("--port=0", f"--verify-address={verify[1]}")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    url = url_of(process)
    assert '"lowered_to": 76' in (tmp_path / "errors").read_text()
    with ExitStack() as clients:
        for _ in range(76):
            client = clients.enter_context(httpx.Client(base_url=url, timeout=30))
            assert client.get("/version").status_code == 200
        assert httpx.get(f"{url}/version", timeout=30).status_code == 503


def test_a_running_answer_is_finished(start: Start, verify: tuple[FakeVerify, str, LoopThread]) -> None:
    """SIGTERM comes while an answer is on its way: it is completed, and no new one is begun."""
    fake, address, loop = verify
    fake.hold_after = 2
    process = start("--port=0", f"--verify-address={address}")
    url = url_of(process)
    with httpx.Client(base_url=url, timeout=30) as client:
        until_healthy(client)
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            host, _, port = url.removeprefix("http://").partition(":")
            refused = False
            while not refused:
                with socket.socket() as probe:
                    refused = probe.connect_ex((host, int(port))) != 0
            loop.run(release(fake))
            rest = "\n".join(lines)
    assert rest.rstrip().endswith("data: [DONE]")
    assert process.wait(30) == 0


async def release(fake: FakeVerify) -> None:
    """Lets held calls go on."""
    fake.release.set()


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_outlasts_the_grace_is_told(
    start: Start, verify: tuple[FakeVerify, str, LoopThread], stream: bool
) -> None:
    fake, address, loop = verify
    fake.hold_after = 2
    process = start("--port=0", f"--verify-address={address}", "--shutdown-grace-s=0.1")
    with httpx.Client(base_url=url_of(process), timeout=30) as client:
        until_healthy(client)
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": stream}
        request = client.build_request("POST", "/v1/chat/completions", json=body)
        if stream:
            reply = client.send(request, stream=True)
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-1]
            error = json.loads(last.removeprefix("data: "))["error"]
        else:
            loop.run(end_when_held(fake, process))
            reply = client.send(request)
            assert reply.status_code == 503
            error = reply.json()["error"]
        assert error["code"] == "service_unavailable"
    assert process.wait(30) == 0


async def end_when_held(fake: FakeVerify, process: subprocess.Popen[str]) -> None:
    """Begins to wait for the next held call, upon which the process is told to end."""
    import asyncio

    async def watch() -> None:
        await fake.holding.wait()
        process.send_signal(signal.SIGTERM)

    fake.watcher = asyncio.create_task(watch())  # type: ignore[attr-defined]


def test_a_second_signal_does_not_wait(start: Start, verify: tuple[FakeVerify, str, LoopThread]) -> None:
    fake, address, _ = verify
    fake.hold_after = 2
    process = start("--port=0", f"--verify-address={address}", "--shutdown-grace-s=600")
    with httpx.Client(base_url=url_of(process), timeout=30) as client:
        until_healthy(client)
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            next(reply.iter_lines())
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


def test_before_it_drains_a_balancer_may_notice(
    start: Start, verify: tuple[FakeVerify, str, LoopThread], tmp_path: Path
) -> None:
    """--drain-delay-s has nothing end at SIGTERM but /health: what runs goes on, and new requests are taken."""
    fake, address, loop = verify
    fake.hold_after = 2
    process = start("--port=0", f"--verify-address={address}", "--drain-delay-s=600")
    with httpx.Client(base_url=url_of(process), timeout=30) as client:
        until_healthy(client)
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            until(lambda: client.get("/health").status_code == 503, "the gateway does not drain")
            loop.run(release(fake))
            assert "data: [DONE]" in list(lines)
        assert ask(client).status_code == 200
        health = client.get("/health")
        assert (health.status_code, health.json()["error"]["message"]) == (503, "The server is shutting down.")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert "Traceback" not in (tmp_path / "errors").read_text()


def test_unix_socket(
    start: Start, verify: tuple[FakeVerify, str, LoopThread], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.app.configure_logging", lambda name: None)
    path = tmp_path / "http.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # left behind by another process
    process = start(f"--uds={path}", f"--verify-address={verify[1]}")
    assert url_of(process) == f"unix:{path}"
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x", timeout=30) as client:
        until_healthy(client)
        assert ask(client).status_code == 200
        with pytest.raises(StartupError, match="another process"):
            main(GatewayArgs(uds=str(path)))
        path.unlink()
        with socket.socket(socket.AF_UNIX) as successor:  # as of one that starts while this one drains
            successor.bind(str(path))
            process.terminate()
            assert process.wait(30) == 0
            assert path.exists()
    path.unlink()
    process = start(f"--uds={path}", f"--verify-address={verify[1]}")
    url_of(process)
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x", timeout=30) as client:
        until_healthy(client)
    process.terminate()
    assert process.wait(30) == 0
    assert not path.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--uds=/tmp/" + "x" * 103], "at most 107 bytes"),
        (["--port=65536"], "--port is 65536; it must be at most 65535"),
    ],
)
def test_addresses_that_there_cannot_be(words: list[str], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        GatewayArgs.parse(words)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "host",
    [pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")), "127.0.0.1"],
)
def test_a_name_is_listened_on_over_what_it_has(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    found = [*socket.getaddrinfo("::1", 0), *(socket.getaddrinfo(host, 0) if host != "::1" else ())]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    check_free("somewhere:0")
    with listen(GatewayArgs(host="somewhere"))[0] as listener:
        assert listener.getsockname()[0] == host


@pytest.mark.skipif(not (has_ipv6() and socket.has_dualstack_ipv6()), reason="this machine has no IPv6")
def test_all_addresses_of_ipv6_are_those_of_ipv4_too(start: Start, verify: tuple[FakeVerify, str, LoopThread]) -> None:
    """gRPC's servers do the same."""
    process = start("--host=::", "--port=0", f"--verify-address={verify[1]}")
    url = url_of(process)
    assert url.startswith("http://[::]:")
    for host in ("127.0.0.1", "[::1]"):
        with httpx.Client(base_url=url.replace("[::]", host), timeout=30) as client:
            until_healthy(client)
            assert ask(client).status_code == 200
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(StartupError, match="cannot listen on"):
        check_free(f"[::]:{taken.getsockname()[1]}")


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
def test_a_port_in_use(start: Start, tmp_path: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = start(f"{flag}={taken.getsockname()[1]}")
        assert process.wait(30) == 2
        assert process.stdout is not None
        assert "listens" not in process.stdout.read()
    assert "cannot listen on 127.0.0.1" in (tmp_path / "errors").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokenizer-path=/nowhere"], "no tokenizer at /nowhere"),
        (["--tokenizer-path={folder}/other"], "other/tokenizer.json has another vocabulary than the model that verify"),
        (["--chat-template={folder}/bad.jinja"], "the chat template does not work"),
        (["--api-key-file=/nowhere"], "--api-key-file"),
        (["--tool-call-parser=magic"], "--tool-call-parser is 'magic'; it must be one of hermes"),
        (["--reasoning-parser=magic"], "--reasoning-parser is 'magic'; it must be one of deepseek-r1"),
    ],
)
def test_what_cannot_be_served_ends_it(
    start: Start, verify: tuple[FakeVerify, str, LoopThread], tmp_path: Path, words: list[str], message: str
) -> None:
    (tmp_path / "bad.jinja").write_text("{% for a in range(99999) %}{{ ''.__class__ }}{% endfor %}{{ nothing.more }}")
    (tmp_path / "other").mkdir()
    byte_level(300).save(str(tmp_path / "other" / "tokenizer.json"))
    filled = [word.format(folder=tmp_path) for word in words]
    process = start("--port=0", f"--verify-address={verify[1]}", *filled)
    assert process.wait(30) == 2
    assert message in (tmp_path / "errors").read_text().splitlines()[-1]
