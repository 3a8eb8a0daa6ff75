"""Keeps one link to every verify process that the given addresses stand for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from draft_service.drafting import Drafting
from draft_service.link import Identity, VerifyLink
from outrider.backoff import Backoff
from outrider.dialing import Dial
from outrider.resolving import LookUp, Resolver, endpoints_of
from outrider.rpc import create_channel
from outrider.telemetry import get_logger
from outrider.v1 import common_pb2, draft_pb2

log = get_logger(__name__)

RESOLVE_PERIOD_S = 10.0

Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Running:
    link: VerifyLink
    task: asyncio.Task[None]


class Worker:
    """Resolves addresses again and again; a new endpoint gets a link, one that is gone loses it when its stream ends.

    `resolve` and `sleep` are parameters so that tests need neither a name server nor time.
    """

    def __init__(
        self, addresses: Sequence[str], drafting: Drafting, identity: Identity, *, max_sessions: int,
        resolve: LookUp = endpoints_of, sleep: Sleep = asyncio.sleep, backoff: Callable[[], Backoff] = Backoff,
        dial: Dial = create_channel, busy_poll: bool = False,
    ) -> None:  # fmt: skip
        self._addresses = tuple(addresses)
        self._drafting = drafting
        self._identity = identity
        self._max_sessions = max_sessions
        self._resolver = Resolver(resolve)
        self._sleep = sleep
        self._dial = dial
        self._busy_poll = busy_poll
        self._backoff = backoff
        self._enlisted: set[str] = set()
        self._running: dict[str, _Running] = {}
        self._draining = False  # no link is made any more

    @property
    def links(self) -> list[VerifyLink]:
        """All links, in the order of their endpoints' first appearance."""
        return [running.link for running in self._running.values()]

    @property
    def target(self) -> common_pb2.ModelInfo:
        """The model of the first link that was ever enlisted; empty when none was."""
        return next((link.target for link in self.links if link.target.vocab_size), common_pb2.ModelInfo())

    async def run(self) -> None:
        """Serves until cancelled."""
        while True:
            await self.look_again()
            await self._sleep(RESOLVE_PERIOD_S)

    async def drain(self, grace_s: float) -> None:
        """Releases every session as DRAINING and ends all streams, at the latest after `grace_s`; makes no links."""
        self._draining = True
        for running in self._running.values():
            if running.link.stats.state != draft_pb2.VERIFY_LINK_STATE_ENLISTED:
                running.task.cancel()
        tasks = [running.task for running in self._running.values()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await asyncio.gather(*(running.link.drain() for running in self._running.values()))
                await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._running.clear()

    async def look_again(self) -> None:
        """Looks all addresses up, and makes and ends links accordingly."""
        endpoints = await self._resolver.resolve(self._addresses)
        for endpoint in endpoints:
            if endpoint not in self._running and not self._draining:
                link = VerifyLink(
                    endpoint, self._drafting, self._identity, self._max_sessions, self._enlisted,
                    backoff=self._backoff(), sleep=self._sleep, dial=self._dial, busy_poll=self._busy_poll,
                )  # fmt: skip
                self._running[endpoint] = _Running(link, asyncio.create_task(link.run(), name=f"link {endpoint}"))
        for endpoint, running in list(self._running.items()):
            if running.task.done():
                del self._running[endpoint]
                if not running.task.cancelled() and running.task.exception() is not None:
                    log.error("a link failed; it is made anew", address=endpoint, exc_info=running.task.exception())
            elif endpoint not in endpoints and running.link.stats.state != draft_pb2.VERIFY_LINK_STATE_ENLISTED:
                running.task.cancel()
