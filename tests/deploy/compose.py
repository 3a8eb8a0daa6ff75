"""docker-compose.yml as it is, in containers: `make test-compose` (scripts/test-compose.sh) builds the images first.

Not among the tests that pytest finds by itself: it takes minutes, and needs Docker.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

from outrider.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from outrider.wire import pack_ids
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
PROJECT = os.environ["COMPOSE_PROJECT_NAME"]
PORT, PROMETHEUS_PORT = free_port(), free_port()
OURS = ("verify", "draft", "gateway", "envoy")
MESSAGES = [{"role": "user", "content": "Write three sentences about the sea, then repeat them word for word."}]
NUM_TOKENS = 120
TICK = threading.Event()  # never set: something to wait on between looks


def compose(*words: str) -> str:
    """Runs docker-compose on the file at the top."""
    command = ["docker-compose", "--project-directory", str(ROOT), *words]
    ports = {"OUTRIDER_PORT": str(PORT), "OUTRIDER_PROMETHEUS_PORT": str(PROMETHEUS_PORT)}
    environment = {**os.environ, **ports}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout


def docker(*words: str) -> str:
    """Runs the docker command."""
    ended = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout.strip()


def containers(service: str) -> list[str]:
    """Ids of a service's containers."""
    labels = [f"label=com.docker.compose.{key}={value}" for key, value in (("project", PROJECT), ("service", service))]
    return docker("ps", "--all", "--quiet", "--filter", labels[0], "--filter", labels[1]).split()


def inspect(container: str) -> dict[str, Any]:
    """All that docker knows of a container."""
    return json.loads(docker("inspect", container))[0]


def crash(container: str) -> None:
    """kill -9 from outside: docker takes it for a crash and starts the container again."""
    os.kill(inspect(container)["State"]["Pid"], signal.SIGKILL)


@pytest.fixture(scope="module")
def http() -> Generator[httpx.Client]:
    """A client of Envoy, with everything up."""
    compose("up", "--detach", "--no-build")
    with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=300) as client:
        until(client, "/health", lambda reply: reply.status_code == 200)
        yield client


@pytest.fixture(scope="module")
def reference(http: httpx.Client) -> str:
    """The answer without drafts."""
    reply = http.post("/v1/chat/completions", json={**body(), "speculative": {"enabled": False}})
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]["content"]


def until(client: httpx.Client, path: str, enough: Any) -> httpx.Response:
    """Repeats GET until the answer is as wanted; AssertionError with the last one after five minutes."""
    last: httpx.Response | None = None
    for _ in range(600):
        with contextlib.suppress(httpx.TransportError):
            last = client.get(path)
            if enough(last):
                return last
        TICK.wait(0.5)
    raise AssertionError(f"{path}: {last} {last.text if last else ''}\n{compose('logs', '--tail=30')}")


def body(**fields: Any) -> dict[str, Any]:
    """A greedy chat."""
    return {"messages": MESSAGES, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **fields}


def stream(http: httpx.Client, begun: threading.Event | None = None) -> str:
    """The text of a streamed answer; sets `begun` after its first words."""
    text = ""
    with http.stream("POST", "/v1/chat/completions", json=body(stream=True)) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            text += event["choices"][0]["delta"].get("content") or ""
            if text and begun is not None:
                begun.set()
    return text


def while_streaming(http: httpx.Client, act: Any, number: int = 4) -> set[str]:
    """Begins answers, does something to the machine, and gives the texts that came."""
    begun = [threading.Event() for _ in range(number)]
    with ThreadPoolExecutor(number) as pool:
        texts = [pool.submit(stream, http, event) for event in begun]
        for event in begun:
            assert event.wait(120)
        act()
        return {text.result() for text in texts}


def said_in(container: str, script: str) -> str:
    """What a Python program prints in a container; nothing while the container is just coming up."""
    command = ["docker", "exec", container, "python", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def up(http: httpx.Client, num_verify: int, num_drafters: int) -> None:
    """Returns when the gateway sees so many verify services, each with so many drafters."""

    def enough(reply: httpx.Response) -> bool:
        if reply.status_code != 200:
            return False
        lines = reply.text.splitlines()
        states = [line.rpartition(" ")[2] for line in lines if line.startswith("outrider_verify_up{")]
        drafters = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("outrider_drafter_up{")]
        return states.count("1.0") == num_verify and drafters == [float(num_drafters)] * num_verify

    script = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8000/metrics').read().decode())"
    replies: list[str] = []
    for _ in range(240):
        replies = [said_in(name, script) for name in containers("gateway")]
        if all(enough(httpx.Response(200, text=text)) for text in replies):
            return
        TICK.wait(0.5)
    raise AssertionError(replies)


def test_an_answer_through_envoy(http: httpx.Client, reference: str) -> None:
    up(http, 1, 1)
    assert stream(http) == reference
    accepted = 0
    for _ in range(20):  # on a busy machine drafts may come too late, or not pay
        reply = http.post("/v1/chat/completions", json=body()).json()
        assert reply["choices"][0]["message"]["content"] == reference
        accepted += reply["usage"]["speculation"]["accepted_tokens"]
        if accepted:
            return
    raise AssertionError("no draft was accepted")


def test_grpc_through_envoy(http: httpx.Client) -> None:
    request = verify_pb2.GenerateRequest(
        prompt_tokens=pack_ids([504, 3575, 282, 4649, 314]),
        sampling=common_pb2.SamplingParams(temperature=0, max_tokens=8),
    )
    with grpc.insecure_channel(f"127.0.0.1:{PORT}") as channel:
        responses = list(verify_pb2_grpc.VerifyServiceStub(channel).Generate(request, timeout=60))
    assert sum(len(response.tokens) for response in responses) == 8


def test_services_start_when_what_they_need_is_there(http: httpx.Client) -> None:
    """Verify said that it serves before draft and gateway were started, and the gateway was well before Envoy was."""
    (verify,), (gateway,) = containers("verify"), containers("gateway")
    lines = docker("logs", "--timestamps", verify).splitlines()
    serving = next(line.partition(" ")[0] for line in lines if "verify serves" in line)
    assert serving[:19] <= inspect(gateway)["State"]["StartedAt"][:19]
    assert serving[:19] <= inspect(containers("draft")[0])["State"]["StartedAt"][:19]
    assert inspect(gateway)["State"]["StartedAt"] < inspect(containers("envoy")[0])["State"]["StartedAt"]


@pytest.mark.parametrize("service", OURS)
def test_a_container_can_do_little(http: httpx.Client, service: str) -> None:
    (container,) = containers(service)
    found = inspect(container)
    host = found["HostConfig"]
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert host["Memory"] > 0
    assert host["NanoCpus"] > 0
    assert host["PidsLimit"] == 512
    python = "/opt/envoy/bin/python" if service == "envoy" else "python"
    script = "import os; print(os.getuid()); open('/opt/x', 'w')"
    ended = subprocess.run(
        ["docker", "exec", container, python, "-c", script], capture_output=True, text=True, check=False
    )
    assert ended.stdout.strip() == "10001"
    assert "Read-only file system" in ended.stderr
    published = [port for ports in found["NetworkSettings"]["Ports"].values() for port in ports or ()]
    assert published == ([{"HostIp": "127.0.0.1", "HostPort": str(PORT)}] if service == "envoy" else [])


@pytest.mark.parametrize(("service", "absent"), [("gateway", "torch"), ("gateway", "numba"), ("draft", "torch")])
def test_an_image_has_only_what_it_needs(http: httpx.Client, service: str, absent: str) -> None:
    script = f"import importlib.util; print(importlib.util.find_spec({absent!r}))"
    assert docker("exec", containers(service)[0], "python", "-c", script) == "None"


def test_two_of_each(http: httpx.Client, reference: str) -> None:
    """More verify services and drafters are found by their names, each drafter by each verify."""
    scale = ["--scale", "verify=2", "--scale", "draft=2", "--scale", "gateway=2"]
    compose("up", "--detach", "--no-build", "--no-recreate", *scale)
    up(http, 2, 2)
    assert while_streaming(http, lambda: None) == {reference}


def test_prometheus_scrapes_all_and_evaluates_the_rules(http: httpx.Client) -> None:
    """With the profile `monitoring` every container of each kind is found, rules have values, and no alert fires."""
    compose("up", "--detach", "--no-build", "--no-recreate", "prometheus")
    wanted = {"verify": 2, "draft": 2, "gateway": 2, "envoy": 1}

    def all_up(reply: httpx.Response) -> bool:
        targets = reply.json()["data"]["activeTargets"]
        return Counter(target["labels"]["job"] for target in targets if target["health"] == "up") == wanted

    def evaluated(reply: httpx.Response) -> bool:
        rules = [rule for group in reply.json()["data"]["groups"] for rule in group["rules"]]
        assert not [rule for rule in rules if rule["health"] == "err"]
        return all(rule["health"] == "ok" for rule in rules)

    with httpx.Client(base_url=f"http://127.0.0.1:{PROMETHEUS_PORT}/api/v1", timeout=60) as client:
        until(client, "/targets", all_up)
        stream(http)
        until(client, "/rules", evaluated)
        until(client, "/query?query=outrider:accept_length:5m", lambda reply: bool(reply.json()["data"]["result"]))
        (mean,) = client.get("/query?query=outrider:accept_length:5m").json()["data"]["result"]
        assert float(mean["value"][1]) >= 1
        firing = [alert for alert in client.get("/alerts").json()["data"]["alerts"] if alert["state"] == "firing"]
        assert firing == []
    compose("rm", "--stop", "--force", "prometheus")


def test_paused_drafters_hold_nobody_up(http: httpx.Client, reference: str) -> None:
    drafters = containers("draft")
    try:
        assert while_streaming(http, lambda: docker("pause", *drafters)) == {reference}
    finally:
        docker("unpause", *drafters)
    up(http, 2, 2)


def test_killed_drafters_are_started_again(http: httpx.Client, reference: str) -> None:
    assert while_streaming(http, lambda: [crash(drafter) for drafter in containers("draft")]) == {reference}
    up(http, 2, 2)


def test_a_killed_verify_service_loses_no_stream(http: httpx.Client, reference: str) -> None:
    assert while_streaming(http, lambda: crash(containers("verify")[0])) == {reference}
    up(http, 2, 2)


def test_a_paused_verify_service_loses_no_stream(http: httpx.Client, reference: str) -> None:
    """Nothing is closed, nothing answers: keepalive finds out, and the answers go on elsewhere."""
    paused = containers("verify")[0]
    try:
        assert while_streaming(http, lambda: docker("pause", paused)) == {reference}
    finally:
        docker("unpause", paused)
    up(http, 2, 2)


def test_a_killed_gateway_is_hardly_missed(http: httpx.Client, reference: str) -> None:
    """A request that it had taken is lost (Envoy cannot know how far it came): the official client asks once more."""
    crash(containers("gateway")[0])
    fields: Any = {"messages": MESSAGES, "temperature": 0, "max_tokens": NUM_TOKENS, "extra_body": {"ignore_eos": True}}
    with openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=1) as client:
        for _ in range(4):
            reply = client.chat.completions.create(model="default", **fields)
            assert reply.choices[0].message.content == reference
    up(http, 2, 2)


@pytest.mark.parametrize("service", ["verify", "gateway", "envoy"])
def test_a_graceful_stop_finishes_what_runs(http: httpx.Client, reference: str, service: str) -> None:
    """Whichever is stopped, answers that are on their way are completed."""
    stopped = containers(service)
    assert while_streaming(http, lambda: docker("stop", "--time", "60", *stopped)) == {reference}
    assert [inspect(container)["State"]["ExitCode"] for container in stopped] == [0] * len(stopped)
    docker("start", *stopped)
    until(http, "/health", lambda reply: reply.status_code == 200)


def test_everything_stops_cleanly(http: httpx.Client) -> None:
    everything = [container for service in OURS for container in containers(service)]
    assert len(everything) == 7
    compose("stop", "--timeout", "60")
    assert [inspect(container)["State"]["ExitCode"] for container in everything] == [0] * 7
