"""Everything goes wrong, in an order that a seed decides, while dozens of streams compare answers with known ones.

    python -m tests.e2e.chaos --seconds 300 --seed 1        (or: make chaos SECONDS=300 SEED=1)

Nothing is timed: what happens next, and when a fault ends, is counted in answers that came. One verify service is
spared at any moment, so no answer may be lost, and none may ever be wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import httpx

from tests.e2e.asking import Lost, Question, Said, ask, every_kind
from tests.e2e.cluster import Cluster, Replica, open_client, running
from tests.e2e.outcome import Outcome
from tests.e2e.rogues import KINDS, Rogue
from tests.e2e.small_model import write_small_model
from tests.e2e.stack import Process
from tests.polling import until_async

NUM_STREAMS = 24
_PAGE_KIB = 4


class Chaos:
    """One run over a cluster whose known answers were taken before."""

    def __init__(
        self, cluster: Cluster, questions: list[Question], known: list[Said], seed: int, only: str = ""
    ) -> None:
        self.cluster = cluster
        self.faults = [fault for fault in _FAULTS if only in fault.__name__]
        self.questions = questions
        self.known = known
        self.rng = random.Random(seed)
        self.outcome = Outcome()
        self._over = False
        self._answered = asyncio.Condition()
        self._rogues: list[Rogue] = []

    async def run(self, seconds: float) -> Outcome:
        """Begins faults for the time given, then waits for all answers, mends everything and looks at what is left."""
        end = time.monotonic() + seconds
        streams = [asyncio.create_task(self._ask_on(random.Random(self.rng.random()))) for _ in range(NUM_STREAMS)]
        bystanders = [asyncio.create_task(work) for work in (self._hang_up(), *self._run_rogues())]
        try:
            while time.monotonic() < end:
                await self._pass(self.rng.randint(2, 6), streams, bystanders)
                fault = self.rng.choice(self.faults)
                self.outcome.events[fault.__name__] += 1
                print(f"{self.outcome.answers} answers; {fault.__name__}", file=sys.stderr)
                await fault(self)
                self._note_memory()
            self._over = True
            await asyncio.gather(*streams)
        finally:
            for task in (*streams, *bystanders):
                task.cancel()
            ended = await asyncio.gather(*bystanders, return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
                raise error
        await self._settle()
        return self.outcome

    async def _pass(self, count: int, streams: list[asyncio.Task[None]], bystanders: list[asyncio.Task[None]]) -> None:
        """Waits for that many more answers; raises what failed."""
        for task in (*streams, *bystanders):
            if task.done():
                task.result()
        await self.turns(count)

    async def turns(self, count: int) -> None:
        """Returns after that many more answers."""
        target = self.outcome.answers + count
        async with self._answered:
            await self._answered.wait_for(lambda: self.outcome.answers >= target or self._over)

    # ---- Clients

    async def _ask_on(self, rng: random.Random) -> None:
        while not self._over:
            index = rng.randrange(len(self.questions))
            question = self.questions[index]
            try:
                said = await self.cluster.ask(question)
            except Lost as error:
                self.outcome.lost.append(f"{datetime.now(UTC).time()} {error}"[:500])
            else:
                if said != self.known[index]:
                    self.outcome.wrong.append(f"{question.name}: {said} instead of {self.known[index]}")
            async with self._answered:
                self.outcome.answers += 1
                self._answered.notify_all()

    async def _hang_up(self) -> None:
        """Clients leave in the middle of an answer, or before they have read any of it."""
        rng = random.Random(self.rng.random())
        streamed = [question for question in self.questions if question.body.get("stream")]
        while True:
            question = rng.choice(streamed)
            try:
                async with self.cluster.client.stream("POST", question.path, json=question.body) as response:
                    async with contextlib.aclosing(cast("AsyncGenerator[str]", response.aiter_lines())) as events:
                        for _ in range(rng.choice([0, 1, 20])):
                            await anext(events)
                    await self.turns(rng.randint(0, 3))
            except (httpx.HTTPError, StopAsyncIteration):
                pass  # the answer was shorter; nobody looks at what it was
            await self.turns(1)

    def _run_rogues(self) -> list[Coroutine[Any, Any, None]]:
        for kind in KINDS:
            back = self.rng.choice(self.cluster.replicas).back
            turn = lambda: self.turns(2)  # noqa: E731
            self._rogues.append(Rogue(kind, back.address, random.Random(self.rng.random()), turn))
        return [rogue.run() for rogue in self._rogues]

    # ---- Faults of verify: the other one is up and spared

    async def _spare(self) -> tuple[Replica, int]:
        """A replica to hurt, and the index of the one that is spared."""
        await self.cluster.until_up(0, 1)
        index = self.rng.randrange(2)
        return self.cluster.replicas[index], 1 - index

    async def verify_killed(self) -> None:
        """Verify is killed and started again."""
        replica, _ = await self._spare()
        await replica.stop(signal.SIGKILL)
        await self.turns(self.rng.randint(0, 20))
        await replica.start()

    async def verify_terminated(self) -> None:
        """Verify drains, hands over and ends with 0."""
        replica, _ = await self._spare()
        assert await replica.stop(signal.SIGTERM) == 0
        await replica.start()

    async def verify_paused(self) -> None:
        """Verify is paused, perhaps for so long that it is given up."""
        replica, _ = await self._spare()
        assert replica.process is not None
        replica.process.popen.send_signal(signal.SIGSTOP)
        await self.turns(self.rng.choice([1, 10, 60]))
        replica.process.popen.send_signal(signal.SIGCONT)

    async def network_reset(self) -> None:
        """Between gateway and verify."""
        replica, _ = await self._spare()
        replica.front.reset()

    async def network_cut(self) -> None:
        """Between gateway and verify."""
        replica, _ = await self._spare()
        replica.front.cut()

    async def networks_reset(self) -> None:
        """The connections of the gateway with both, which are alive, are reset: that loses nothing either."""
        await self.cluster.until_up(0, 1)
        for replica in self.cluster.replicas:
            self.rng.choice([replica.front.reset, replica.front.cut])()

    async def network_held(self) -> None:
        """Nothing passes between gateway and verify for a while."""
        replica, _ = await self._spare()
        replica.front.hold()
        await self.turns(self.rng.choice([1, 10, 40]))
        replica.front.heal()

    async def network_half_open(self) -> None:
        """Connections die without a word; keepalive has to find out."""
        replica, _ = await self._spare()
        replica.front.abandon()
        await self.turns(self.rng.choice([1, 50]))
        replica.front.heal()

    async def network_down(self) -> None:
        """The gateway cannot reach a verify service for a while."""
        replica, _ = await self._spare()
        replica.front.refuse()
        await self.turns(self.rng.randint(1, 30))
        replica.front.heal()

    # ---- Faults of drafters, and of their network

    async def _restart_drafter(self, number: int) -> None:
        index = self.rng.randrange(len(self.cluster.drafters))
        process = self.cluster.drafters[index]
        await asyncio.to_thread(process.wait_for, "draft serves")
        status = await asyncio.to_thread(process.stop, number)
        assert status == (0 if number == signal.SIGTERM else -number)
        self.cluster.drafters[index] = self.cluster.start(*process.words)

    async def drafter_killed(self) -> None:
        """A drafter is killed in the middle of whatever it does."""
        await self._restart_drafter(signal.SIGKILL)

    async def drafter_terminated(self) -> None:
        """A drafter gives its sessions up and ends with 0."""
        await self._restart_drafter(signal.SIGTERM)

    async def drafter_paused(self) -> None:
        """A drafter is paused, and goes on with what it thought before."""
        process = self.rng.choice(self.cluster.drafters)
        process.popen.send_signal(signal.SIGSTOP)
        await self.turns(self.rng.choice([1, 10, 60]))
        process.popen.send_signal(signal.SIGCONT)

    async def drafters_reset(self) -> None:
        """All drafters' streams of one verify service are reset."""
        self.rng.choice(self.cluster.replicas).back.reset()

    async def drafters_held(self) -> None:
        """Drafters are cut off: late at first, then overtaken."""
        back = self.rng.choice(self.cluster.replicas).back
        back.hold()
        await self.turns(self.rng.choice([1, 20, 60]))
        back.heal()

    async def drafters_half_open(self) -> None:
        """Drafters' streams die without a word."""
        back = self.rng.choice(self.cluster.replicas).back
        back.abandon()
        await self.turns(self.rng.choice([1, 20]))
        back.heal()

    # ---- A gateway of its own, to be killed

    async def gateway_killed(self) -> None:
        """The gateway is killed with answers under way: verify must notice. Its clients lose theirs."""
        addresses = (f"--verify-address={replica.front.address}" for replica in self.cluster.replicas)
        process = self.cluster.start("gateway", "--port=0", *addresses)
        url = (await asyncio.to_thread(process.wait_for, r"gateway listens on (\S+)")).group(1)
        async with open_client(url) as client:
            await until_async(
                lambda: client.get("/health"), "the gateway is not healthy", done=lambda reply: reply.status_code == 200
            )
            indexes = [self.rng.randrange(len(self.questions)) for _ in range(8)]
            asked = [asyncio.create_task(ask(client, self.questions[index])) for index in indexes]
            await self.turns(1)
            await asyncio.to_thread(process.stop, signal.SIGKILL)
            for index, said in zip(indexes, await asyncio.gather(*asked, return_exceptions=True), strict=True):
                if not isinstance(said, Lost) and said != self.known[index]:
                    self.outcome.wrong.append(f"{self.questions[index].name}: {said}")

    # ---- What is left

    def _note_memory(self) -> None:
        processes = {"gateway": self.cluster.gateway}
        processes |= {f"verify {process.popen.pid}": process for process in self._verifies()}
        processes |= {
            f"draft {process.popen.pid}": process
            for process in self.cluster.drafters
            if any("draft serves" in line for line in process.lines)
        }
        for name, process in processes.items():
            pages = int(Path(f"/proc/{process.popen.pid}/statm").read_text().split()[1])
            self.outcome.memory_kib.setdefault(name, []).append(pages * _PAGE_KIB)

    def _verifies(self) -> list[Process]:
        return [replica.process for replica in self.cluster.replicas if replica.process is not None]

    async def _settle(self) -> None:
        """Everything works again; every page is free, no session is left, and answers are right."""
        for replica in self.cluster.replicas:
            replica.front.heal()
            replica.back.heal()
        await self.cluster.until_up(0, 1)
        for index, question in enumerate(self.questions):
            assert await self.cluster.ask(question) == self.known[index], question.name
        for replica in self.cluster.replicas:
            await replica.until(lambda info: not info.state.running_requests and not info.state.queued_requests)
            info = await replica.info()
            if info.state.free_pages != info.state.total_pages:
                self.outcome.pages_kept.append(f"{replica.address}: {info.state}")
            assert not any(drafter.sessions for drafter in info.drafters)
        self.outcome.complaints = self.cluster.complaints()
        self.outcome.comings = [line for line in self.cluster.gateway.lines if '"event": "verify service' in line]
        self.outcome.broken_calls = sum("a generate call broke" in line for line in self.cluster.gateway.lines)
        self.outcome.rogues = {rogue.kind: [str(rogue.num_streams), *sorted(rogue.reasons)] for rogue in self._rogues}
        self.outcome.enlisted = {rogue.kind for rogue in self._rogues if rogue.num_enlisted}


_FAULTS: list[Callable[[Chaos], Awaitable[None]]] = [
    Chaos.verify_killed, Chaos.verify_terminated, Chaos.verify_paused, Chaos.network_reset, Chaos.network_cut,
    Chaos.networks_reset, Chaos.network_held, Chaos.network_half_open, Chaos.network_down, Chaos.drafter_killed,
    Chaos.drafter_terminated, Chaos.drafter_paused, Chaos.drafters_reset, Chaos.drafters_held,
    Chaos.drafters_half_open, Chaos.gateway_killed,
]  # fmt: skip


def make_questions() -> list[Question]:
    """Questions of every kind, with several seeds for the sampled ones."""
    questions = every_kind(200)
    for seed in (21, 22):
        for question in every_kind(80):
            body = dict(question.body)
            if "seed" in body:
                questions.append(replace(question, name=f"{question.name}, seed {seed}", body={**body, "seed": seed}))
    return questions


async def run(seconds: float, seed: int, only: str = "", logs: Path | None = None) -> Outcome:
    """Makes a whole run. only: faults with this in their name; logs: a folder for what the processes said."""
    with tempfile.TemporaryDirectory(prefix="or-") as folder:
        model = write_small_model(Path(folder))
        async with running(model, verify=("--shutdown-grace-s=1",)) as cluster:
            questions = make_questions()
            known = [await cluster.ask(question) for question in questions]
            await cluster.draft("--speculative-algorithm=NGRAM")
            await cluster.draft(
                "--speculative-algorithm=STANDALONE", f"--speculative-draft-model-path={model}",
                "--dtype=float32", "--device=cpu", "--threads=1", "--draft-max-total-tokens=8192",
            )  # fmt: skip
            try:
                return await Chaos(cluster, questions, known, seed, only).run(seconds)
            finally:
                if logs is not None:
                    cluster.write_logs(logs)


def main() -> int:
    """Prints the outcome; returns 1 where something that must hold did not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only faults with this in their name")
    parser.add_argument("--logs", type=Path, help="folder for what all processes said")
    settings = parser.parse_args()
    outcome = asyncio.run(run(settings.seconds, settings.seed, settings.only, settings.logs))
    print(outcome.report())
    return 1 if outcome.wrong or outcome.lost or outcome.pages_kept or outcome.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
