"""How replicas are asked whether they are there, and what silence says against them.

Each is asked for its server info every second, and at once when a call to it broke. One that missed to answer, or that
broke a call, is in doubt. One that cannot be reached is down. So is one that is late too often, and then its calls
break: a process may hang while its connection answers pings.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from gateway.call_failures import ChannelClosed, answer_of
from gateway.replica import Replica, ServerInfo
from gateway.served import differences
from outrider.telemetry import get_logger
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import WIRE_VERSION

log = get_logger(__name__)

# What probes without an answer, in a row, add up to until a replica is down: three that ran out of time, as on a busy
# machine; six, in about a second, that a connection lost; one where there is nothing to connect to.
_LATE, _LOST, DOWN = 2, 1, 6


@dataclass(frozen=True, slots=True)
class ProbeTimes:
    """How often replicas are looked at, in seconds."""

    interval_s: float = 1.0
    timeout_s: float = 3.0
    first_retry_s: float = 0.1
    max_retry_s: float = 2.0
    resolve_interval_s: float = 5.0


def weight(code: grpc.StatusCode, state: grpc.ChannelConnectivity) -> int:
    """What a probe that failed says against its replica."""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return _LATE
    lost = code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
    return _LOST if lost and state is not grpc.ChannelConnectivity.TRANSIENT_FAILURE else DOWN


class Prober:
    """Asks replicas, and sets their state by what they answer.

    longest_context: of those that serve. on_change: is told when one comes, goes or is no longer in doubt; give_up: of
    one that answers nothing.
    """

    def __init__(
        self, times: ProbeTimes, *, longest_context: Callable[[], int], on_change: Callable[[], object],
        give_up: Callable[[Replica], object],
    ) -> None:  # fmt: skip
        self.first: ServerInfo | None = None  # of the first that served
        self._times = times
        self._longest_context = longest_context
        self._on_change = on_change
        self._give_up = give_up

    async def keep_watching(self, replica: Replica) -> None:
        """Asks again and again, sooner where it was told to look again; until cancelled."""
        retry_s = self._times.first_retry_s
        while True:
            replica.look_again.clear()
            try:
                well = await self.probe(replica)
            except Exception as error:  # a fault of ours, or an answer without sense: it is asked again
                log.error("asking a verify service failed", address=replica.address, exc_info=error)
                well = False
            if well:
                retry_s = self._times.first_retry_s
                pause_s = self._times.interval_s
            else:
                pause_s = retry_s * random.uniform(0.5, 1.0)
                retry_s = min(2 * retry_s, self._times.max_retry_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await replica.look_again.wait()

    async def probe(self, replica: Replica, *, counts: bool = True) -> bool:
        """Asks for the server info and sets the replica's state by it; whether it may serve. `counts`: so do misses,
        which are counted by one who asks after the other."""
        try:
            info = await answer_of(
                replica.stub.GetServerInfo(
                    verify_pb2.VerifyServiceGetServerInfoRequest(), timeout=self._times.timeout_s
                )
            )
        except ChannelClosed:
            return False
        except grpc.aio.AioRpcError as error:
            if counts:
                self._note_miss(replica, error)
            return False
        if info is None:  # how grpc gives bytes that it cannot parse
            self._set_serving(replica, False, "its answer is no message")
            return False
        replica.learn(info)
        replica.missed = 0
        if replica.doubtful:
            replica.doubtful = False
            self._on_change()
        reason = self._unfit(replica, info)
        if reason is None:
            if self.first is None:
                self.first = info
            self._tell_differences(replica, info, self.first.model)
        self._set_serving(replica, reason is None, reason or "")
        return reason is None

    def _tell_differences(self, replica: Replica, info: ServerInfo, first: common_pb2.ModelInfo) -> None:
        """Warns of one that may serve, and does otherwise than those that do or than the first."""
        longest = self._longest_context()
        if not replica.serving and replica.context_length < longest:
            log.warning(
                "a verify service has a shorter context: it gets only requests that fit it", address=replica.address,
                context_length=replica.context_length, of_the_gateway=longest,
            )  # fmt: skip
        if replica.told_of == info.boot_id:
            return
        replica.told_of = info.boot_id
        if differs := differences(first, info.model):
            log.warning(
                "a verify service serves another model than the first one, whose name and text files are used",
                address=replica.address, differs=differs,
            )  # fmt: skip

    def _note_miss(self, replica: Replica, error: grpc.aio.AioRpcError) -> None:
        replica.missed += weight(error.code(), replica.channel.get_state())
        replica.doubtful = True
        if replica.missed >= DOWN:
            self._set_serving(replica, False, error.code().name, error.details() or "")
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self._give_up(replica)

    def _unfit(self, replica: Replica, info: ServerInfo) -> str | None:
        """Why a replica that answers takes no sessions from us."""
        if replica.leaving:
            return "it is not among the addresses any more"
        if info.wire_version != WIRE_VERSION:
            return f"it speaks wire version {info.wire_version}, this gateway {WIRE_VERSION}"
        if info.state.draining:
            return "it is draining"
        if self.first is not None and info.model.vocab_fingerprint != self.first.model.vocab_fingerprint:
            return "its vocabulary differs from that of the replicas seen before"
        return None

    def _set_serving(self, replica: Replica, serving: bool, reason: str, detail: str = "") -> None:
        """Says when it comes and goes; and of one that never came each reason once."""
        if replica.serving == serving and (serving or reason in replica.reasons):
            return
        not_yet = reason == grpc.StatusCode.UNAVAILABLE.name and replica.info is None  # a gateway may be up first
        state = "up" if serving else "down" if replica.serving else "not reached yet" if not_yet else "not usable"
        if serving:
            replica.reasons.clear()
        else:
            replica.reasons.add(reason)
        if replica.serving != serving:
            replica.serving = serving
            self._on_change()
        log.info(f"verify service {state}", address=replica.address, reason=reason, detail=detail)
