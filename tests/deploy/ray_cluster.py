"""deploy/ray on a local cluster of two nodes, one of which is killed under load: `make test-ray` runs it.

Not among the tests that pytest finds by itself: it takes minutes, and needs the extra `ray`.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tests.ports import free_port

FOLDER = str(Path(__file__).parents[2] / "deploy" / "ray")
sys.path.insert(0, FOLDER)
import outrider_serve  # noqa: E402

PORT = free_port()
MESSAGES = [{"role": "user", "content": "Write three sentences about the sea, then repeat them word for word."}]
NUM_TOKENS = 160
pytestmark = pytest.mark.timeout(1200)  # the cluster's start and end are in it
NODE = {"num_cpus": 3}  # room for one pair and what Serve needs, not for two pairs
TICK = threading.Event()  # never set: something to wait on between looks


@pytest.fixture(scope="module")
def cluster() -> Generator[Cluster]:
    """A head with the gateway and the proxy that we talk to, a second node with the directory."""
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "resources": {"front": 1}})
    second = cluster.add_node(**NODE)
    ray.init(
        address=cluster.address, namespace="test", log_to_driver=False, runtime_env={"working_dir": FOLDER}
    )  # fmt: skip
    there = NodeAffinitySchedulingStrategy(second.node_id, soft=True)
    options = {"name": outrider_serve.DIRECTORY, "namespace": outrider_serve.NAMESPACE, "scheduling_strategy": there}
    first = outrider_serve.Directory.options(lifetime="detached", max_restarts=-1, max_task_retries=3, **options)
    ray.get(first.remote().addresses.remote())
    serve.start(http_options={"host": "127.0.0.1", "port": PORT}, proxy_location="HeadOnly")
    settings = outrider_serve.Settings(
        verify_flags=["--threads=1", "--max-total-tokens=16384"],
        verify_bundle={"CPU": 1}, draft_bundle={"CPU": 1}, min_pairs=1, max_pairs=2, sessions_per_pair=2,
        host="127.0.0.1", gateway_options={"num_cpus": 0, "resources": {"front": 1}},
    )  # fmt: skip
    serve.run(outrider_serve.build(settings), name="outrider", route_prefix="/")
    yield cluster
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def http(cluster: Cluster) -> Generator[httpx.Client]:
    """A client of Serve's proxy, once a request is served."""
    with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=300) as client:
        until(lambda: client.get("/health").status_code == 200)
        yield client


@pytest.fixture(scope="module")
def reference(http: httpx.Client) -> str:
    """The answer without drafts."""
    reply = http.post("/v1/chat/completions", json={**body(), "speculative": {"enabled": False}})
    return reply.json()["choices"][0]["message"]["content"]


def until(enough: Callable[[], bool]) -> None:
    """Returns when the condition holds; looks twice a second, for five minutes at most."""
    for _ in range(600):
        if enough():
            return
        TICK.wait(0.5)
    raise AssertionError(json.dumps(pairs()))


def pairs() -> list[dict[str, Any]]:
    """The gateway's state of each verify service."""
    return httpx.get(f"http://127.0.0.1:{PORT}/server_info", timeout=30).json().get("internal_states", [])


def verify_addresses() -> list[str]:
    """The addresses that the directory has; none while it moves to another node."""
    try:
        return ray.get(outrider_serve.directory().addresses.remote(), timeout=30) or []
    except ray.exceptions.RayError:
        return []


def body(**fields: Any) -> dict[str, Any]:
    """A greedy chat."""
    return {"messages": MESSAGES, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **fields}


def stream(http: httpx.Client, begun: threading.Event) -> str:
    """The text of a streamed answer."""
    text = ""
    with http.stream("POST", "/v1/chat/completions", json=body(stream=True)) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += event["choices"][0]["delta"].get("content") or ""
                begun.set()
    return text


def test_one_pair_answers(http: httpx.Client, reference: str) -> None:
    reply = http.post("/v1/chat/completions", json=body()).json()
    assert reply["choices"][0]["message"]["content"] == reference
    assert len(verify_addresses()) == 1


def test_load_starts_a_second_pair_and_a_dead_node_loses_no_stream(
    cluster: Cluster, http: httpx.Client, reference: str
) -> None:
    """Eight streams go on all the time; a pair comes, a node is killed, and every answer is what it would have been."""
    stop, begun = threading.Event(), threading.Event()

    def keep_asking() -> int:
        count = 0
        while not stop.is_set():
            assert stream(http, begun) == reference
            count += 1
        return count

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(keep_asking) for _ in range(8)]
        try:
            until(lambda: len(verify_addresses()) == 2)
            victim = node_to_kill(cluster)
            cluster.remove_node(victim, allow_graceful=False)
            until(lambda: len(verify_addresses()) == 1)
            cluster.add_node(**NODE)
            until(lambda: len(verify_addresses()) == 2)
        finally:
            stop.set()
        answered = [one.result() for one in asking]
    assert min(answered) >= 1
    print(f"\n{sum(answered)} answers, none lost or wrong")


def node_to_kill(cluster: Cluster) -> Any:
    """The one that is not the head."""
    (node,) = cluster.worker_nodes
    return node
