"""The verify services behind this gateway: their addresses, which of them serve, and which takes the next call.

Names among the addresses are looked up again and again (gateway/addresses.py); whether replicas are well, and which
are in doubt or down, is found out by gateway/probing.py. One in doubt gets new sessions only where no other can take
them, and none that go on from elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Container, Coroutine, Generator, Iterable
from typing import Any

import grpc
import grpc.aio

from gateway.addresses import Addresses
from gateway.affinity import PrefixMap, PromptKeys
from gateway.probing import Prober, ProbeTimes
from gateway.replica import Replica, ServerInfo, close_channel
from gateway.served import Served, served_by
from gateway.takers import takers_of
from outrider.dialing import Dial
from outrider.errors import StartupError
from outrider.rpc import create_channel, error_from_rpc
from outrider.stopping import cancelled
from outrider.telemetry import get_logger

log = get_logger(__name__)

_CALL_TIMEOUT_S = 30.0
_LAST_CALLS_S = 3600.0  # a name may go before its service, which is watched meanwhile
_SLACK = 4  # sessions: what a prefill that is saved is worth, about


class ReplicaSet:
    """Keeps the list of replicas and their state; `start` and `close` frame its life."""

    def __init__(self, addresses: Iterable[str], times: ProbeTimes | None = None, dial: Dial = create_channel) -> None:
        self._addresses = Addresses(addresses)
        self._dial = dial
        self._times = times or ProbeTimes()
        self.prober = Prober(
            self._times, longest_context=lambda: 0 if self.served is None else self.served.context_length,
            on_change=self._tell_change, give_up=self._give_up_connection,
        )  # fmt: skip
        self._replicas: dict[str, Replica] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._resolver: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._prefixes = PrefixMap()
        self.draining = False  # the gateway ends: no answer waits for a replica while there is none
        self._num_waiting = 0  # answers under way that look for a replica

    async def start(self) -> None:
        """Begins to look for replicas; returns before any is found."""
        if self._addresses.may_change:
            self._resolver = asyncio.create_task(self._keep_resolving())
        else:
            await self.look_up()  # which asks nobody

    async def close(self) -> None:
        """Ends the looking and closes the channels."""
        if self._resolver is not None:
            await cancelled(self._resolver)
        await asyncio.sleep(0)  # what has not begun would not end what it is to end
        for task in self._closing:
            task.cancel()  # those that wait for their last calls
        self._set_addresses(set(), calls_s=None)
        await asyncio.gather(*self._closing, return_exceptions=True)

    @property
    def info(self) -> ServerInfo | None:
        """What the first one said that served: all must have its vocabulary."""
        return self.prober.first

    @property
    def serving(self) -> list[Replica]:
        """Replicas that take new sessions, by address."""
        return [replica for _, replica in sorted(self._replicas.items()) if replica.serving]

    @property
    def _processes(self) -> list[Replica]:
        """A replica of each process, by address: of several addresses of one the first that serves, if any does."""
        best_last = sorted(self._replicas.values(), key=lambda one: (not one.serving, one.address), reverse=True)
        found = {one.address if one.info is None else one.info.boot_id: one for one in best_last}
        return sorted(found.values(), key=lambda one: one.address)

    @property
    def states(self) -> list[tuple[str, bool]]:
        """The address of every process, and whether it takes new sessions."""
        return [(replica.address, replica.serving) for replica in self._processes]

    @property
    def served(self) -> Served | None:
        """What those that serve are together, as they last said; None: none does."""
        infos = [replica.info for replica in self.serving if replica.info is not None]
        return served_by(infos) if infos else None

    @property
    def infos(self) -> list[tuple[str, ServerInfo]]:
        """The last answer of each process that serves, with its address."""
        return [(one.address, one.info) for one in self._processes if one.serving and one.info is not None]

    def pick(
        self,
        *,
        numerics_id: str | None = None,
        avoid: Container[Replica] = (),
        prompt: PromptKeys | None = None,
        num_positions: int = 0,
        num_choices: int = 1,
        sure: bool = False,
    ) -> Replica:
        """A replica, of `numerics_id` where given: that which had most of the prompt before, else the least busy.

        num_positions: of the prompt and the longest output; its context holds them, so that no answer ends early on it.
        num_choices: of the call, which it gives.
        The first of these gives way when it has over _SLACK sessions more than the least busy, and over twice as many.
        sure: none that is in doubt.

        Unavailable without a replica, ResourceExhausted when all are full: for a new session also when what is left is
        for answers under way, which wait for it.
        """
        alike = takers_of(
            self.serving, numerics_id=numerics_id, avoid=avoid, num_positions=num_positions,
            num_choices=num_choices, sure=sure, kept=0 if sure else self._num_waiting,
        )  # fmt: skip
        least = min(alike, key=lambda replica: replica.load)
        if len(self._replicas) == 1 or prompt is None:
            return least
        most = max(least.load + _SLACK, 2 * least.load)
        near = {replica.address: replica for replica in alike if replica.load <= most}
        found = self._prefixes.find(prompt.keys, near.__contains__)
        chosen = near[found] if found is not None else least
        self._prefixes.remember(prompt.keys, chosen.address)
        return chosen

    def broke(self, replica: Replica) -> None:
        """Notes that a call to `replica` broke: it is in doubt until it answers again."""
        replica.doubtful = True
        replica.look_again.set()

    @contextlib.contextmanager
    def waiting(self) -> Generator[None]:
        """Frames the time in which an answer under way looks for a replica: what room there is, is for it."""
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1

    async def wait_for_change(self, timeout_s: float) -> None:
        """Returns when a replica came, went or changed state, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def ask_all(self) -> list[ServerInfo]:
        """Fresh infos of the replicas that serve, each process once; one that does not answer is left out."""
        serving = self.serving
        asked = await asyncio.gather(*(self.prober.probe(replica, counts=False) for replica in serving))
        infos = [replica.info for replica, well in zip(serving, asked, strict=True) if well]
        return list({info.boot_id: info for info in infos if info is not None}.values())

    async def flush_caches(self) -> int:
        """Empties the prefix cache of every replica that serves; the pages that this freed."""
        try:
            return sum(await asyncio.gather(*(replica.flush_cache(_CALL_TIMEOUT_S) for replica in self.serving)))
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error

    # ---- Addresses

    async def look_up(self) -> None:
        """Learns what the addresses stand for now, and watches that. OSError, StartupError: it cannot be dialled."""
        self._set_addresses(await self._addresses.resolve())

    async def _keep_resolving(self) -> None:
        while True:
            try:
                await self.look_up()
            except (OSError, StartupError) as error:  # certificates that are being replaced: the next round is soon
                log.warning("cannot dial the verify addresses", error=str(error))
            except Exception as error:  # a fault of ours
                log.error("looking up the verify addresses failed", exc_info=error)
            await asyncio.sleep(self._times.resolve_interval_s)

    def _set_addresses(self, addresses: set[str], *, calls_s: float | None = _LAST_CALLS_S) -> None:
        """Replicas that are gone get no more calls; those that run on them have `calls_s`, without it none."""
        for address in addresses - self._replicas.keys():
            replica = Replica.at(address, self._dial(address))
            replica.watch = asyncio.create_task(self.prober.keep_watching(replica))
            self._replicas[address] = replica
        for address in self._replicas.keys() - addresses:
            replica = self._replicas.pop(address)
            replica.leaves()
            self._in_background(replica.close(calls_s))
            self._tell_change()

    def _give_up_connection(self, replica: Replica) -> None:
        """Has the calls of one that answers nothing go on elsewhere, and dials it anew.

        Whether the process hangs or the connection carries pings alone, gRPC cannot tell.
        """
        replica.missed = 0  # as many more, and the new one is given up too
        replica.break_calls("the replica answers nothing")
        try:
            channel = self._dial(replica.address)
        except (OSError, StartupError) as error:
            log.warning("cannot dial a verify service anew", address=replica.address, error=str(error))
        else:
            self._in_background(close_channel(replica.move_to(channel), _CALL_TIMEOUT_S))

    def _in_background(self, closing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
