"""Keeps one link to every verify process that the given addresses stand for."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from draft_service.backoff import Backoff
from draft_service.drafting import Drafting
from draft_service.link import Identity, VerifyLink
from outrider.args.links import check_address
from outrider.dialing import Dial
from outrider.rpc import create_channel
from outrider.telemetry import get_logger
from outrider.v1 import common_pb2, draft_pb2

log = get_logger(__name__)

RESOLVE_PERIOD_S = 10.0

Resolve = Callable[[str], Awaitable[list[str]]]
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
        resolve: Resolve | None = None, sleep: Sleep = asyncio.sleep, backoff: Callable[[], Backoff] = Backoff,
        dial: Dial = create_channel, busy_poll: bool = False,
    ) -> None:  # fmt: skip
        for address in addresses:
            check_address("--verify-address", address)
        self._addresses = tuple(addresses)
        self._drafting = drafting
        self._identity = identity
        self._max_sessions = max_sessions
        self._resolve = resolve or resolve_address
        self._sleep = sleep
        self._dial = dial
        self._busy_poll = busy_poll
        self._backoff = backoff
        self._enlisted: set[str] = set()
        self._running: dict[str, _Running] = {}
        self._unresolved: dict[str, str] = {}
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
            self._adjust(await self._endpoints())
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

    async def _endpoints(self) -> dict[str, None]:
        """Endpoints of all addresses, in order. An address that does not resolve keeps the links that it has."""
        found: dict[str, None] = {}
        for address in self._addresses:
            try:
                found |= dict.fromkeys(await self._resolve(address))
                self._unresolved.pop(address, None)
            except (OSError, UnicodeError) as error:
                if self._unresolved.get(address) != str(error):
                    log.warning("address does not resolve", address=address, reason=str(error))
                self._unresolved[address] = str(error)
                found |= dict.fromkeys(self._running)
        return found

    def _adjust(self, endpoints: dict[str, None]) -> None:
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


async def resolve_address(address: str) -> list[str]:
    """The endpoints that an address stands for: itself, or ip:port for each address of its name.

    OSError if none is known, UnicodeError for a name that DNS cannot be asked for.
    """
    if address.startswith(("unix:", "unix-abstract:")):
        return [address]
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    with contextlib.suppress(ValueError):
        return [_endpoint(str(ipaddress.ip_address(host)), port)]
    infos = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    return list(dict.fromkeys(_endpoint(str(info[4][0]), port) for info in infos))


def _endpoint(ip: str, port: str) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
