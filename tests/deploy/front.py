"""The real Envoy with deploy/envoy/envoy.yaml in front of real gateways and verify services that a test scripts."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from outrider.health_service import Health
from outrider.rpc import add_health_and_reflection, bind, create_server, set_serving
from outrider.tls import TlsFiles, server_credentials
from outrider.v1 import verify_pb2, verify_pb2_grpc
from tests.gateway.fakes import FakeVerify, LoopThread
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
RUN = ROOT / "deploy" / "envoy" / "run.py"
SERVICE = verify_pb2.DESCRIPTOR.services_by_name["VerifyService"].full_name
HAS_ENVOY = importlib.util.find_spec("envoy") is not None


@dataclass
class Replica:
    """A scripted verify service on a port, with the health that Envoy asks for."""

    fake: FakeVerify
    address: str
    health: Health

    async def set_serving(self, serving: bool) -> None:
        """Tells those who watch its health whether it serves."""
        set_serving(self.health, [SERVICE], serving)


@contextlib.asynccontextmanager
async def replica(fake: FakeVerify, tls: TlsFiles | None = None) -> AsyncGenerator[Replica]:
    """A scripted verify service on a free port, with TLS where there are files for it."""
    server = create_server()
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(fake, server)
    health = add_health_and_reflection(server, [SERVICE])
    address = bind(server, "127.0.0.1:0", None if tls is None else server_credentials(tls))
    await server.start()
    set_serving(health, [SERVICE], True)
    try:
        yield Replica(fake, address, health)
    finally:
        await server.stop(None)


class Gateway:
    """`outrider gateway` as a process that can be killed and started again on its port."""

    def __init__(self, verify: Sequence[str]) -> None:
        self.port = free_port()
        self._verify = verify
        self.start()

    def start(self) -> None:
        """Starts the gateway; returns when it would serve a request."""
        words = [f"--port={self.port}", *(f"--verify-address={address}" for address in self._verify)]
        command = [sys.executable, "-P", "-m", "outrider", "gateway", *words, "--served-model-name=small"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
        until_ok(f"http://127.0.0.1:{self.port}/health", self.process)

    def kill(self) -> None:
        """Kills the gateway, which says nothing any more."""
        self.process.kill()
        self.process.wait()


class Front:
    """Envoy, the services behind it, and a client."""

    def __init__(self, gateways: list[Gateway], replicas: list[Replica], folder: Path, *words: str) -> None:
        self.gateways, self.replicas = gateways, replicas
        self.port, self.stats_port = free_port(), free_port()
        self.url, self.stats_url = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.stats_port}"
        command = [
            sys.executable, str(RUN), f"--port={self.port}", f"--stats-port={self.stats_port}", f"--run-dir={folder}",
            *(f"--gateway=127.0.0.1:{gateway.port}" for gateway in gateways),
            *(f"--verify={replica.address}" for replica in replicas), *words,
        ]  # fmt: skip
        self.output = (folder / "output").open("w")
        self.process = subprocess.Popen(command, stdout=self.output, stderr=subprocess.STDOUT, process_group=0)
        until_ok(f"{self.stats_url}/ready", self.process)
        self.http = httpx.Client(base_url=self.url, timeout=30)

    def until_served(self) -> None:
        """Returns when a request would be answered: Envoy has seen that a gateway is well."""
        until_ok(f"{self.url}/health", self.process)

    def terminate(self) -> None:
        """Sends SIGTERM to Envoy's group, as a terminal sends Ctrl-C: it drains."""
        os.killpg(self.process.pid, signal.SIGTERM)

    def close(self) -> None:
        """Ends Envoy."""
        self.http.close()
        self.process.send_signal(signal.SIGINT)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        self.output.close()


@contextlib.contextmanager
def front(
    fakes: list[FakeVerify], num_gateways: int, folder: Path, *words: str, tls: TlsFiles | None = None
) -> Generator[tuple[Front, LoopThread]]:
    """Envoy, gateways and fakes; and the loop that the fakes run in."""
    loop = LoopThread()
    stack = contextlib.AsyncExitStack()
    gateways: list[Gateway] = []
    try:
        replicas = [loop.run(stack.enter_async_context(replica(fake, tls))) for fake in fakes]
        for _ in range(num_gateways):
            gateways.append(Gateway([replica.address for replica in replicas]))
        envoy = Front(gateways, replicas, folder, *words)
        try:
            yield envoy, loop
        finally:
            envoy.close()
    finally:
        for gateway in gateways:
            gateway.kill()
        loop.run(stack.aclose())
        loop.close()


def until_ok(url: str, process: subprocess.Popen[bytes]) -> None:
    """Returns when GET answers 200; AssertionError when the process ends before that."""
    with httpx.Client(timeout=10, verify=False) as client:
        while process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if client.get(url).status_code == 200:
                    return
    raise AssertionError(f"{process.args} ended with {process.returncode}")
