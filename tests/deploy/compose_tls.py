"""docker-compose.yml with docker-compose.tls.yml, in containers: the second half of `make test-compose`."""

from __future__ import annotations

import os
import ssl
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from outrider.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from outrider.wire import pack_ids
from tests.deploy.compose import OURS, PORT, ROOT, TICK, body, compose, containers, inspect, until
from tests.outrider.test_strangers import told_here

FOLDER = Path(os.environ["OUTRIDER_TLS_DIR"])
MOUNTED = "/etc/outrider-tls"
SHOWN = [f"--verify-ssl-certfile={MOUNTED}/cert.pem", f"--verify-ssl-keyfile={MOUNTED}/key.pem"]
TRUST = f"--verify-ssl-ca-certs={MOUNTED}/ca.pem"


def trusting() -> ssl.SSLContext:
    """A client that trusts the authority."""
    return ssl.create_default_context(cafile=FOLDER / "authority" / "ca.pem")


def secret(name: str) -> str:
    """A token or key."""
    return (FOLDER / name).read_text().strip()


@pytest.fixture(scope="module")
def https() -> Generator[httpx.Client]:
    """A client of Envoy with a key, with everything up."""
    compose("up", "--detach", "--no-build")
    headers = {"authorization": f"Bearer {secret('api-keys')}"}
    with httpx.Client(base_url=f"https://localhost:{PORT}", verify=trusting(), headers=headers, timeout=300) as client:
        until(client, "/health", lambda reply: reply.status_code == 200)
        yield client


def within(service: str, *words: str) -> int:
    """Runs a command in a service's container; its exit code."""
    command = ["docker", "exec", containers(service)[0], *words]
    return subprocess.run(command, capture_output=True, check=False).returncode


def until_logged(service: str, words: str, after: int = 0) -> None:
    """Returns when a container has said so more than `after` times."""
    for _ in range(120):
        ended = subprocess.run(["docker", "logs", containers(service)[0]], capture_output=True, text=True, check=True)
        if (ended.stdout + ended.stderr).count(words) > after:
            return
        TICK.wait(0.5)
    raise AssertionError(f"{service} never says {words!r}")


def test_https_with_a_key(https: httpx.Client) -> None:
    plain = https.post("/v1/chat/completions", json={**body(), "speculative": {"enabled": False}}).json()
    for _ in range(20):  # on a busy machine drafts may come too late, or not pay
        reply = https.post("/v1/chat/completions", json=body()).json()
        assert reply["choices"][0]["message"]["content"] == plain["choices"][0]["message"]["content"]
        if reply["usage"]["speculation"]["accepted_tokens"]:
            break
    else:
        raise AssertionError("no draft was accepted: is the drafter enlisted?")
    for key in ("", "Bearer wrong"):
        assert https.post("/v1/chat/completions", json=body(), headers={"authorization": key}).status_code == 401
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://localhost:{PORT}/health")


def test_grpc_with_a_token(https: httpx.Client) -> None:
    request = verify_pb2.GenerateRequest(
        prompt_tokens=pack_ids([504, 3575, 282, 4649, 314]),
        sampling=common_pb2.SamplingParams(temperature=0, max_tokens=8),
    )
    credentials = grpc.ssl_channel_credentials((FOLDER / "authority" / "ca.pem").read_bytes())
    with grpc.secure_channel(f"localhost:{PORT}", credentials) as channel:
        stub: Any = verify_pb2_grpc.VerifyServiceStub(channel)
        metadata = [("authorization", f"Bearer {secret('tokens')}")]
        responses = list(stub.Generate(request, timeout=60, metadata=metadata))
        assert sum(len(response.tokens) for response in responses) == 8
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request, timeout=60))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(("of", "address"), [("gateway", "verify-service:50051"), ("verify", "draft-service:50052")])
def test_who_shows_no_certificate_gets_nowhere(https: httpx.Client, of: str, address: str) -> None:
    assert within(of, "outrider", "health", f"--address={address}", TRUST, *SHOWN) == 0
    assert within(of, "outrider", "health", f"--address={address}", TRUST) == 1
    assert within(of, "outrider", "health", f"--address={address}") == 1
    if told_here():
        until_logged(address.partition("-")[0], "a connection ended without a call")


def test_gateways_answer_envoy_alone(https: httpx.Client) -> None:
    url = "--url=https://gateway-service:8000/health"
    assert within("draft", "outrider", "health", url, TRUST, *SHOWN) == 0
    assert within("draft", "outrider", "health", url, TRUST) == 1
    assert within("draft", "outrider", "health", url.replace("https", "http")) == 1
    if told_here():
        until_logged("gateway", "a connection ended before TLS was agreed on")


def test_operators_have_a_token_of_their_own(https: httpx.Client) -> None:
    words = ["outrider", "drafters", "list", "--verify-address=localhost:50051", TRUST, *SHOWN]
    assert within("verify", *words, "--admin-token-file=/run/secrets/admin-tokens") == 0
    assert within("verify", *words, "--admin-token-file=/run/secrets/tokens") != 0
    assert within("gateway", "cat", "/run/secrets/admin-tokens") != 0


def test_no_service_sees_anothers_key(https: httpx.Client) -> None:
    for service in OURS:
        (container,) = containers(service)
        mounts = {mount["Destination"]: mount for mount in inspect(container)["Mounts"]}
        assert mounts[MOUNTED]["Source"] == str(FOLDER / service)
        assert not mounts[MOUNTED]["RW"]


def test_certificates_are_renewed_while_everything_runs(https: httpx.Client) -> None:
    shown = ssl.get_server_certificate(("localhost", PORT))
    subprocess.run([ROOT / "deploy" / "certificates.sh", FOLDER], check=True, capture_output=True)
    for _ in range(120):
        if ssl.get_server_certificate(("localhost", PORT)) != shown:
            break
        TICK.wait(0.5)
    else:
        raise AssertionError("Envoy shows the old certificate")
    assert within("gateway", "outrider", "health", "--address=verify-service:50051", TRUST, *SHOWN) == 0
    until_logged("verify", "certificates read again")
    with httpx.Client(base_url=https.base_url, headers=https.headers, verify=trusting(), timeout=300) as client:
        assert client.post("/v1/chat/completions", json=body()).status_code == 200


def test_everything_stops_cleanly(https: httpx.Client) -> None:
    everything = [container for service in OURS for container in containers(service)]
    compose("stop", "--timeout", "60")
    assert [inspect(container)["State"]["ExitCode"] for container in everything] == [0] * len(OURS)
