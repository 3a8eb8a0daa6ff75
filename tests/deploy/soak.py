"""Mixed load through Envoy for a long time, with cancellations and rolling restarts: `python -m tests.deploy.soak`.

Two of every service, and Envoy in front. Of each pair one is restarted again and again, in turn, as an operator would
(SIGTERM, wait, start), a drafter now and then killed; the other lives through it all, and its memory and open files
must end as they were. Every answer is compared with the one that was given in peace; none may be lost or wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

from tests.deploy.front import Front
from tests.e2e.asking import Lost, Question, Said, ask, every_kind
from tests.e2e.small_model import write_small_model
from tests.e2e.stack import Process
from tests.ports import free_port

VERIFY = ("--dtype=float32", "--device=cpu", "--threads=1", "--max-total-tokens=8192", "--context-length=1024")
NUM_STREAMS = 12
MAX_TOKENS = 96
_CANCELLED = 0.15  # of the questions
_WARM = 0.25  # of the samples: what comes before is not compared
_MOST_KIB = 24 * 1024  # that a process may have more at the end: the prefix cache's bookkeeping, the trie, allocators
_MOST_FILES = 16


@dataclass(eq=False)
class Service:
    """One process that can be started again as it was."""

    name: str
    words: tuple[str, ...]
    ready: str
    metrics: str = ""  # of a gateway
    process: Process | None = None

    async def start(self) -> None:
        """Starts the process; returns when it says that it serves."""
        self.process = Process(*self.words)
        await asyncio.to_thread(self.process.wait_for, self.ready)

    async def stop(self, number: int = signal.SIGTERM) -> int:
        """Ends the process; its exit code."""
        process, self.process = self.process, None
        return 0 if process is None else await asyncio.to_thread(process.stop, number)

    def usage(self) -> tuple[int, int]:
        """KiB of memory, and open files."""
        assert self.process is not None
        folder = Path(f"/proc/{self.process.popen.pid}")
        lines = (folder / "status").read_text().splitlines()
        (resident,) = (int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
        return resident, len(list((folder / "fd").iterdir()))


@dataclass
class Outcome:
    """The result of a run."""

    answers: int = 0
    cancelled: int = 0
    restarts: int = 0
    kills: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    bad_exits: list[str] = field(default_factory=list)
    samples: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def grown(self) -> dict[str, dict[str, float]]:
        """Growth of each process that lived through it, in memory and files: medians after less before the middle."""
        found: dict[str, dict[str, float]] = {}
        for name, samples in self.samples.items():
            warm = samples[int(_WARM * len(samples)) :]
            half = len(warm) // 2
            if half < 2:
                continue
            before, after = warm[:half], warm[half:]
            found[name] = {
                "memory_kib": statistics.median(s[0] for s in before),
                "grown_kib": statistics.median(s[0] for s in after) - statistics.median(s[0] for s in before),
                "files": statistics.median(s[1] for s in before),
                "grown_files": statistics.median(s[1] for s in after) - statistics.median(s[1] for s in before),
            }
        return found

    def holds(self) -> bool:
        """Whether everything that must hold did."""
        grown = self.grown().values()
        flat = bool(grown) and all(one["grown_kib"] <= _MOST_KIB and one["grown_files"] <= _MOST_FILES for one in grown)
        return self.answers > 0 and not self.wrong and not self.lost and not self.bad_exits and flat

    def report(self) -> str:
        """The outcome as JSON."""
        kept = {name: value for name, value in vars(self).items() if name != "samples"}
        grown = self.grown()
        return json.dumps({**kept, "grown": grown, "too_short_to_tell": not grown, "holds": self.holds()}, indent=1)


class Soak:
    """Load on a running fleet."""

    def __init__(self, fleet: list[Service], client: httpx.AsyncClient, stats_url: str, seed: int) -> None:
        self.fleet, self.client, self._stats_url = fleet, client, stats_url
        self.outcome = Outcome()
        self._chance = random.Random(seed)
        self._known: list[tuple[Question, Said]] = []
        self._stopping = asyncio.Event()

    async def run(self, seconds: float, *, everything: bool = False) -> Outcome:
        """Applies load until the time is over and all were restarted; `everything`: also those that usually live on."""
        for question in every_kind(MAX_TOKENS):
            self._known.append((question, await ask(self.client, question)))
        streams = [asyncio.create_task(self._keep_asking(index)) for index in range(NUM_STREAMS)]
        try:
            await self._keep_restarting(time.monotonic() + seconds, everything)
        finally:
            self._stopping.set()
            await asyncio.gather(*streams)
        return self.outcome

    async def _keep_asking(self, index: int) -> None:
        chance = random.Random(index)
        while not self._stopping.is_set():
            question, known = chance.choice(self._known)
            try:
                if chance.random() < _CANCELLED:
                    await self._hang_up(question)
                    continue
                said = await ask(self.client, question)
            except Lost as error:
                self.outcome.lost.append(str(error))
                continue
            self.outcome.answers += 1
            if said != known:
                self.outcome.wrong.append(question.name)

    async def _hang_up(self, question: Question) -> None:
        """Leaves after the first event, or before an answer that is not streamed."""
        heard = asyncio.Event()
        asking = asyncio.create_task(ask(self.client, question, heard.set))
        if question.body.get("stream"):
            hearing = asyncio.create_task(heard.wait())
            await asyncio.wait([asking, hearing], return_when=asyncio.FIRST_COMPLETED)
            hearing.cancel()
        else:
            await asyncio.wait([asking], timeout=self._chance.uniform(0.01, 0.2))
        self.outcome.cancelled += asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking

    async def _keep_restarting(self, end: float, everything: bool) -> None:
        restarted = [service for service in self.fleet if everything or service.name.endswith("0")]
        while True:
            for service in restarted:
                await self._restart(service)
                self._note_usage()
            if time.monotonic() >= end:
                return

    async def _restart(self, service: Service) -> None:
        """Restarts as an operator would; kills a drafter as often as not. The next restart waits for some answers."""
        if service.name.startswith("draft") and self._chance.random() < 0.5:
            await service.stop(signal.SIGKILL)
            self.outcome.kills += 1
        else:
            code = await service.stop()
            self.outcome.restarts += 1
            if code != 0:
                self.outcome.bad_exits.append(f"{service.name}: {code}")
        await service.start()
        await self._until_all_are_used()
        wanted = self.outcome.answers + NUM_STREAMS
        while self.outcome.answers < wanted and not self.outcome.lost:  # noqa: ASYNC110  nothing tells when
            await asyncio.sleep(0.05)

    async def _until_all_are_used(self) -> None:
        """Waits until Envoy and every gateway use all again, as docs/operations.md says, before the next one goes."""
        healthy = r'^envoy_cluster_membership_healthy\{envoy_cluster_name="(?:gateway|verify)\w*"\} (\d+)$'
        urls = {service.metrics: (r"^outrider_verify_up\{.*\} (\d)", 1) for service in self.fleet if service.metrics}
        urls[f"{self._stats_url}/stats/prometheus"] = (healthy, 2)
        async with httpx.AsyncClient(timeout=60) as client:

            async def fewest(url: str, number: str) -> int:
                text = (await client.get(url)).raise_for_status().text
                return min(map(int, re.findall(number, text, re.MULTILINE)))

            for url, (number, wanted) in urls.items():
                while await fewest(url, number) < wanted:  # noqa: ASYNC110  nothing tells when
                    await asyncio.sleep(0.05)

    def _note_usage(self) -> None:
        for service in self.fleet:
            if service.name.endswith("1"):
                self.outcome.samples.setdefault(service.name, []).append(service.usage())


@contextlib.asynccontextmanager
async def fleet(model: Path, folder: Path) -> AsyncIterator[tuple[list[Service], httpx.AsyncClient, str]]:
    """Two of each behind Envoy, a client of Envoy, and the address of its counters."""
    verify_ports, gateway_ports = [free_port() for _ in range(2)], [free_port() for _ in range(2)]
    known = [f"--verify-address=127.0.0.1:{port}" for port in verify_ports]
    services = [
        *(
            Service(f"verify {i}", ("verify", f"--listen=127.0.0.1:{port}", f"--model-path={model}", *VERIFY), "serves")
            for i, port in enumerate(verify_ports)
        ),
        *(Service(f"draft {i}", ("draft", "--listen=127.0.0.1:0", *known), "serves") for i in range(2)),
        *(
            Service(
                f"gateway {i}",
                ("gateway", f"--port={port}", "--drain-delay-s=3", *known),
                "listens",
                f"http://127.0.0.1:{port}/metrics",
            )
            for i, port in enumerate(gateway_ports)
        ),
    ]
    async with contextlib.AsyncExitStack() as stack:
        for service in services:
            stack.push_async_callback(service.stop, signal.SIGKILL)
        await asyncio.gather(*(service.start() for service in services))
        gateways: Any = [SimpleNamespace(port=port) for port in gateway_ports]
        replicas: Any = [SimpleNamespace(address=f"127.0.0.1:{port}") for port in verify_ports]
        front = await asyncio.to_thread(Front, gateways, replicas, folder)
        stack.callback(front.close)
        await asyncio.to_thread(front.until_served)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=NUM_STREAMS)
        client = httpx.AsyncClient(base_url=front.url, timeout=300, limits=limits)
        yield services, await stack.enter_async_context(client), front.stats_url


async def soak(seconds: float, seed: int, *, everything: bool = False) -> Outcome:
    """Makes a whole run with a small model."""
    with tempfile.TemporaryDirectory() as name:
        model, folder = Path(name) / "model", Path(name) / "envoy"
        model.mkdir()
        folder.mkdir()
        write_small_model(model)
        async with fleet(model, folder) as (services, client, stats_url):
            return await Soak(services, client, stats_url, seed).run(seconds, everything=everything)


def main() -> int:
    """Prints the outcome; returns 1 where something that must hold did not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    outcome = asyncio.run(soak(args.seconds, args.seed))
    print(outcome.report())
    return 0 if outcome.holds() else 1


if __name__ == "__main__":
    sys.exit(main())
