"""Outrider on a Ray cluster: Ray Serve runs the same processes on many nodes, restarts them, and scales them by load.

A `Pair` is one verify service with its drafters, in a placement group: a bundle for the target, one for each drafter.
A `Gateway` is gateway/app.py behind Serve's HTTP proxies; it finds verify services through the `Directory`. Tokens go
from gateway to verify and drafts from drafter to verify by our own gRPC: Ray places, watches and scales, no more.
`serve run --working-dir deploy/ray deploy/ray/outrider.yaml` sends this folder to the nodes and starts it all. Nothing
else in Outrider knows of Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from outrider import env
from outrider.health import grpc_health
from outrider.rpc import create_channel
from outrider.v1 import verify_pb2, verify_pb2_grpc

NAMESPACE = "outrider"
DIRECTORY = "directory"
_REPORT_S = 1.0
_FORGET_S = 6.0
_CALL_TIMEOUT_S = 5.0
_STARTUP_TIMEOUT_S = 1800.0  # a model's first download included
_STOP_TIMEOUT_S = 40.0  # more than the 30 s that running answers get


class Settings(BaseModel):
    """`args` of the application in outrider.yaml."""

    model_config = ConfigDict(extra="forbid")

    verify_flags: list[str] = []  # of `outrider verify`, less --listen
    draft_flags: list[str] = ["--speculative-algorithm=NGRAM"]  # of `outrider draft`, less --listen, --verify-address
    gateway_flags: list[str] = []  # of `outrider gateway`, less host, port and --verify-address
    num_drafters: int = Field(1, ge=0)  # of each verify service
    host: str | None = None  # where services listen instead of at their node's address: loopback, on one machine
    verify_bundle: dict[str, float] = {"CPU": 2}
    draft_bundle: dict[str, float] = {"CPU": 1}
    placement: str = "PACK"  # of a pair's bundles: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD over nodes
    min_pairs: int = Field(1, ge=1)
    max_pairs: int = Field(1, ge=1)
    sessions_per_pair: float = Field(16, gt=0)  # running and waiting, that one more pair is started for
    downscale_delay_s: float = 300.0
    min_gateways: int = Field(1, ge=1)
    max_gateways: int = Field(1, ge=1)
    requests_per_gateway: float = Field(200, gt=0)
    gateway_options: dict[str, Any] = {"num_cpus": 1}  # Ray's options of a gateway's actor


@ray.remote(num_cpus=0)
class Directory:
    """Where verify services are: each says so every second, and is forgotten when it stops.

    Ray may start it again on another node, knowing nothing: it tells nothing then until all had time to report.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._seen: dict[str, float] = {}

    def report(self, address: str) -> None:
        """The verify service at `address` serves."""
        self._seen[address] = time.monotonic()

    def addresses(self) -> list[str] | None:
        """All that were heard of lately; None where that cannot be known yet, and what was known before holds."""
        now = time.monotonic()
        if now - self._began < _FORGET_S:
            return None
        self._seen = {address: at for address, at in self._seen.items() if now - at < _FORGET_S}
        return sorted(self._seen)


def directory() -> Any:
    """The one directory of the cluster; it moves to another node when its own dies."""
    return Directory.options(
        name=DIRECTORY,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=3,
    ).remote()


class Process:
    """One of our commands as a child that dies with this actor."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-P", "-m", "outrider", *words]
        self._child = subprocess.Popen(command, env=env.for_child())

    def check(self) -> None:
        """RuntimeError when it has ended."""
        code = self._child.poll()
        if code is not None:
            raise RuntimeError(f"{self._child.args} ended with {code}")

    def stop(self) -> None:
        """SIGTERM, and SIGKILL when it does not listen."""
        self._child.send_signal(signal.SIGTERM)
        try:
            self._child.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()


@ray.remote(max_restarts=-1)
class Drafter:
    """`outrider draft` in a bundle of its pair. It ends when its process does, and Ray starts it again."""

    def __init__(self, settings: Settings, verify_address: str) -> None:
        listen = f"{settings.host or ray.util.get_node_ip_address()}:{free_port()}"
        words = [f"--listen={listen}", f"--verify-address={verify_address}", *settings.draft_flags]
        self._process = Process("draft", *words)

    async def watch(self) -> None:
        """Returns never; the actor exits when the process has."""
        while True:
            try:
                self._process.check()
            except RuntimeError:
                os._exit(1)
            await asyncio.sleep(_REPORT_S)


@serve.deployment
class Pair:
    """A verify service in the first bundle, its drafters in the others."""

    async def __init__(self, settings: Settings) -> None:
        """Returns when verify serves; Serve awaits it."""
        self.address = f"{settings.host or ray.util.get_node_ip_address()}:{free_port()}"
        self._verify = Process("verify", f"--listen={self.address}", *settings.verify_flags)
        async with asyncio.timeout(_STARTUP_TIMEOUT_S):
            while await grpc_health(self.address, _CALL_TIMEOUT_S) is not None:
                self._verify.check()
                await asyncio.sleep(_REPORT_S)
        self._channel = create_channel(self.address)
        self._drafters = [_place_drafter(settings, 1 + index, self.address) for index in range(settings.num_drafters)]
        self._watched = [drafter.watch.remote() for drafter in self._drafters]
        self._directory = directory()
        self._reporting = asyncio.create_task(self._keep_reporting())

    async def _keep_reporting(self) -> None:
        while True:
            with contextlib.suppress(ray.exceptions.RayError):  # it moves; the next report finds it
                await self._directory.report.remote(self.address)
            await asyncio.sleep(_REPORT_S)

    async def check_health(self) -> None:
        """Serve replaces the pair when this raises."""
        self._verify.check()
        wrong = await grpc_health(self.address, _CALL_TIMEOUT_S)
        if wrong is not None:
            raise RuntimeError(wrong)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Sessions that run and wait, for `BySessions`."""
        request = verify_pb2.VerifyServiceGetServerInfoRequest()
        info = await verify_pb2_grpc.VerifyServiceStub(self._channel).GetServerInfo(request, timeout=_CALL_TIMEOUT_S)
        return {"sessions": float(info.state.running_requests + info.state.queued_requests)}

    async def __del__(self) -> None:
        """Drains: verify tells gateways so, and finishes what it has. Serve awaits this too."""
        await asyncio.to_thread(self._verify.stop)
        self._reporting.cancel()
        await self._channel.close()


class BySessions:
    """How many pairs the sessions of all need; Serve keeps it within the bounds, and waits before it goes down."""

    def __init__(self, sessions_per_pair: float) -> None:
        self._sessions_per_pair = sessions_per_pair

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of pairs, and nothing to remember."""
        counts = (context.aggregated_metrics or {}).get("sessions", {}).values()
        return max(1, math.ceil(sum(counts) / self._sessions_per_pair)), {}


def _place_drafter(settings: Settings, bundle_index: int, verify_address: str) -> Any:
    resources = dict(settings.draft_bundle)
    strategy = PlacementGroupSchedulingStrategy(ray.util.get_current_placement_group(), bundle_index)
    options = {
        "num_cpus": resources.pop("CPU", 0),
        "num_gpus": resources.pop("GPU", 0),
        "resources": resources,
        "scheduling_strategy": strategy,
    }
    return Drafter.options(**options).remote(settings, verify_address)


def gateway_app(flags: list[str]) -> Any:
    """The gateway's application, which looks for verify services in a file that a thread keeps to the directory."""
    from gateway.app import create_app
    from outrider.args import GatewayArgs

    path = Path(tempfile.mkdtemp(prefix="outrider-")) / "verify-addresses"
    path.touch()
    threading.Thread(target=_keep_addresses, args=(path,), daemon=True).start()
    return create_app(GatewayArgs.parse([f"--verify-address=file:{path}", *flags]))


def _keep_addresses(path: Path) -> None:
    known = directory()
    while True:
        with contextlib.suppress(ray.exceptions.RayError):
            addresses = ray.get(known.addresses.remote(), timeout=_CALL_TIMEOUT_S)
            if addresses is not None:
                beside = path.with_suffix(".new")
                beside.write_text("\n".join(addresses))
                beside.replace(path)  # whole, for whoever reads it now
        time.sleep(_REPORT_S)


def build(settings: Settings) -> serve.Application:
    """What outrider.yaml imports: gateways in front, pairs beside them."""
    pair = Pair.options(
        name="Pair",
        ray_actor_options={"num_cpus": settings.verify_bundle.get("CPU", 0), **_gpus(settings.verify_bundle)},
        placement_group_bundles=[settings.verify_bundle, *[settings.draft_bundle] * settings.num_drafters],
        placement_group_strategy=settings.placement,
        autoscaling_config=AutoscalingConfig(
            min_replicas=settings.min_pairs,
            max_replicas=settings.max_pairs,
            downscale_delay_s=settings.downscale_delay_s,
            policy=AutoscalingPolicy(
                policy_function=BySessions, policy_kwargs={"sessions_per_pair": settings.sessions_per_pair}
            ),
        ),
        health_check_period_s=5,
        health_check_timeout_s=2 * _CALL_TIMEOUT_S,
        graceful_shutdown_timeout_s=_STOP_TIMEOUT_S + 5,
    ).bind(settings)

    def make_app() -> Any:  # Serve calls it in each replica; of a partial it would think that it is the application
        return gateway_app(settings.gateway_flags)

    ingress = serve.ingress(make_app)()
    return (
        serve.deployment(ingress)
        .options(
            name="Gateway",
            ray_actor_options=settings.gateway_options,
            max_ongoing_requests=2048,
            autoscaling_config=AutoscalingConfig(
                min_replicas=settings.min_gateways,
                max_replicas=settings.max_gateways,
                target_ongoing_requests=settings.requests_per_gateway,
            ),
            graceful_shutdown_timeout_s=_STOP_TIMEOUT_S,
        )
        .bind(pair)
    )


def _gpus(bundle: dict[str, float]) -> dict[str, float]:
    return {"num_gpus": bundle["GPU"]} if "GPU" in bundle else {}


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
