"""Verify services, drafters and a gateway as processes of their own, with proxies on the links between them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from outrider.rpc import create_channel
from outrider.v1 import verify_pb2, verify_pb2_grpc
from tests.e2e.asking import Question, Said, ask
from tests.e2e.proxy import Proxy
from tests.e2e.stack import Process
from tests.polling import until_async

_PATIENCE_S = 120.0
POOL_TOKENS = 8192
VERIFY_FLAGS = (
    "--dtype=float32", "--device=cpu", "--threads=1", f"--max-total-tokens={POOL_TOKENS}", "--context-length=1024",
    "--disable-speculation-brake", "--max-running-requests=32", "--max-draft-wait-ms=5",
)  # fmt: skip


@dataclass(eq=False)
class Replica:
    """One verify service. The gateway reaches it by `front`, drafters by `back`, tests by `address`."""

    model: Path
    flags: tuple[str, ...]
    front: Proxy
    back: Proxy
    processes: list[Process]  # all that were ever started, others' too
    process: Process | None = None
    address: str = ""

    async def start(self) -> None:
        """Starts the process, on a new port."""
        self.process = process = Process(
            "verify", "--listen=127.0.0.1:0", f"--model-path={self.model}", *VERIFY_FLAGS, *self.flags
        )
        self.processes.append(process)
        found = await asyncio.to_thread(process.wait_for, r"verify serves \S+ at (\S+)")
        self.address = self.front.target = self.back.target = found.group(1)

    async def stop(self, number: int = signal.SIGKILL) -> int:
        """Ends the process; its exit code."""
        process, self.process = self.process, None
        return 0 if process is None else await asyncio.to_thread(process.stop, number)

    async def info(self) -> verify_pb2.VerifyServiceGetServerInfoResponse:
        """Its GetServerInfo."""
        async with create_channel(self.address) as channel:
            request = verify_pb2.VerifyServiceGetServerInfoRequest()
            return await verify_pb2_grpc.VerifyServiceStub(channel).GetServerInfo(request, timeout=60.0)

    async def metric(self, name: str) -> float:
        """The value of one of its metrics; the flags must say --metrics-port=0."""
        assert self.process is not None
        url = (await asyncio.to_thread(self.process.wait_for, r"verify tells metrics at (\S+)")).group(1)
        async with httpx.AsyncClient(timeout=_PATIENCE_S) as client:
            text = (await client.get(url)).raise_for_status().text
        lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        assert lines, f"{url} has no {name}"
        return sum(float(line.split()[-1]) for line in lines)

    async def until(self, done: Callable[[verify_pb2.VerifyServiceGetServerInfoResponse], object]) -> None:
        """Asks until `done` says so."""
        await until_async(self.info, "verify does not say so", done=done)

    async def until_idle(self) -> None:
        """Waits until no session is left; every page must be free then."""
        await self.until(lambda info: not info.state.running_requests and not info.state.queued_requests)
        state = (await self.info()).state
        assert state.free_pages == state.total_pages


@dataclass(eq=False)
class Cluster:
    """The processes that run, and their links."""

    model: Path
    replicas: list[Replica]
    gateway: Process
    client: httpx.AsyncClient
    processes: list[Process]  # all that were ever started
    drafters: list[Process] = field(default_factory=list)

    async def ask(self, question: Question, on_event: Callable[[], object] = bool) -> Said:
        """The whole answer; Lost when none comes."""
        return await ask(self.client, question, on_event)

    async def up(self) -> set[int]:
        """Replicas that the gateway takes for up."""
        text = (await self.client.get("/metrics")).text
        lines = (line for line in text.splitlines() if line.startswith("outrider_verify_up{"))
        addresses = {line.split('"')[1] for line in lines if line.endswith(" 1.0")}
        return {index for index, replica in enumerate(self.replicas) if replica.front.address in addresses}

    async def until_up(self, *indexes: int) -> None:
        """Waits until the gateway takes exactly these replicas for up."""
        await until_async(self.up, f"not up: {indexes}", done=lambda up: up == set(indexes))

    def start(self, *words: str) -> Process:
        """Starts a process."""
        self.processes.append(Process(*words))
        return self.processes[-1]

    def write_logs(self, folder: Path) -> None:
        """Writes what each process said into a file of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        for number, process in enumerate(self.processes):
            text = "\n".join([" ".join(process.words), *process.lines, ""])
            (folder / f"{number}-{process.words[0]}.log").write_text(text, encoding="utf-8")

    def complaints(self) -> list[str]:
        """Log lines in which a process tells of its own faults."""
        marks = ('"level": "error"', '"level": "critical"', "Traceback", "Task exception", "was never awaited")
        return [
            f"{process.words[0]}: " + "\n".join(process.lines[max(0, index - 2) : index + 20])
            for process in self.processes
            for index, line in enumerate(process.lines)
            if any(mark in line for mark in marks)
        ]

    async def draft(self, *flags: str, replicas: list[int] | None = None) -> Process:
        """Starts a draft service for replicas (all of them) and waits until they have it."""
        chosen = self.replicas if replicas is None else [self.replicas[index] for index in replicas]
        before = [len((await replica.info()).drafters) for replica in chosen]
        addresses = (f"--verify-address={replica.back.address}" for replica in chosen)
        process = self.start("draft", "--listen=127.0.0.1:0", *addresses, *flags)
        self.drafters.append(process)
        await asyncio.to_thread(process.wait_for, "draft serves")
        for replica, count in zip(chosen, before, strict=True):
            await replica.until(lambda info, count=count: len(info.drafters) > count)
        return process


def open_client(url: str) -> httpx.AsyncClient:
    """A client that waits long, and opens a connection for each request."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S, limits=limits)


@contextlib.asynccontextmanager
async def running(
    model: Path, num_replicas: int = 2, *, verify: tuple[str, ...] = (), gateway_flags: tuple[str, ...] = ()
) -> AsyncIterator[Cluster]:
    """Replicas that serve and a gateway that has found them; no drafters. All is killed at the end."""
    async with contextlib.AsyncExitStack() as stack:
        replicas: list[Replica] = []
        processes: list[Process] = []
        for _ in range(num_replicas):
            front = await stack.enter_async_context(Proxy(""))
            back = await stack.enter_async_context(Proxy(""))
            replicas.append(Replica(model, verify, front, back, processes))
            stack.push_async_callback(replicas[-1].stop)
        await asyncio.gather(*(replica.start() for replica in replicas))
        words = ("gateway", "--port=0", *(f"--verify-address={replica.front.address}" for replica in replicas))
        gateway = Process(*words, *gateway_flags)
        processes.append(gateway)
        stack.push_async_callback(asyncio.to_thread, gateway.stop, signal.SIGKILL)
        url = (await asyncio.to_thread(gateway.wait_for, r"gateway listens on (\S+)")).group(1)
        client = await stack.enter_async_context(open_client(url))
        cluster = Cluster(model, replicas, gateway, client, processes)
        stack.push_async_callback(_stop_drafters, cluster)
        await cluster.until_up(*range(num_replicas))
        await until_async(
            lambda: client.get("/health"), "the gateway is not healthy", done=lambda reply: reply.status_code == 200
        )
        yield cluster


async def _stop_drafters(cluster: Cluster) -> None:
    for process in cluster.drafters:
        await asyncio.to_thread(process.stop, signal.SIGKILL)
