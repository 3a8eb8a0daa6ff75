"""Where one request has been, and where it goes next: how often, how long and with which numbers it may fail over."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from gateway.affinity import PromptKeys
from gateway.call_failures import Broken, Differs
from gateway.replica import Replica
from gateway.replicas import ReplicaSet
from outrider.errors import DeadlineExceeded, Internal, ResourceExhausted, Unavailable
from outrider.telemetry import get_logger
from outrider.v1 import verify_pb2
from outrider.wire import num_ids

log = get_logger(__name__)

_MANY_BREAKS = 8  # of one request, after which each is paused for
_MAX_ENGINES = 2  # that may fail while they compute a request: it may be the cause, and must not go through them all


class EnginesFailed(Internal):
    """Several engines failed while they computed one request."""

    final = True


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounds on failover. `max_failures` counts breaks in a row without a new token; `patience_s` is all the time that
    may pass, from a break on, without a replica that serves."""

    max_failures: int = 4
    patience_s: float = 30.0
    first_pause_s: float = 0.05
    max_pause_s: float = 1.0


@dataclass(slots=True)
class Numerics:
    """What all calls of one request are computed with: the `numerics_id` of whichever gave tokens first."""

    id: str | None = None

    def keep_to(self, numerics_id: str) -> None:
        """Notes what tokens that came are of. Differs where others were first."""
        self.id = self.id or numerics_id or None
        if numerics_id and numerics_id != self.id:
            raise Differs("it computes otherwise than the replica that began this request")


class Route:
    """Where one request has been, and where it goes next."""

    def __init__(
        self, replicas: ReplicaSet, retry: RetryPolicy, timeout_s: float, request: verify_pb2.GenerateRequest,
        numerics: Numerics,
    ) -> None:  # fmt: skip
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._prompt = PromptKeys(request.prompt_tokens, request.cache_salt)
        self._num_positions = num_ids(request.prompt_tokens) + request.sampling.max_tokens
        self._replicas = replicas
        self._retry = retry
        self._failures = 0  # in a row
        self._breaks = 0  # in all
        self._refusals = 0  # of full replicas since the first of these
        self._engines = 0  # that failed, in all
        self.numerics = numerics  # from the first tokens on only replicas that would have given the same
        self._full: list[Replica] = []
        self._refusal: ResourceExhausted | None = None
        self._give_up_at = self._deadline

    def fork(self) -> Route:
        """A route for one choice that goes on from here."""
        route = copy.copy(self)
        route._refusals, route._full, route._refusal = 0, [], None
        return route

    async def next_replica(self, num_choices: int) -> Replica:
        """A replica to try now for so many choices. Before anything broke there is one at once or never; then a sure
        one is waited for."""
        if self._failures == 0:
            return self._pick(num_choices)
        with self._replicas.waiting():
            await asyncio.sleep(self._pause_s())
            while True:
                try:
                    return self._pick(num_choices)
                except (Unavailable, ResourceExhausted):
                    left_s = self._give_up_at - time.monotonic()
                    if left_s <= 0 or (self._replicas.draining and not self._replicas.serving):
                        raise
                    await self._replicas.wait_for_change(min(left_s, self._retry.max_pause_s))

    def _pick(self, num_choices: int) -> Replica:
        try:
            return self._replicas.pick(
                numerics_id=self.numerics.id,
                avoid=self._full,
                prompt=self._prompt,
                num_positions=self._num_positions,
                num_choices=num_choices,
                sure=self._failures > 0,
            )
        except Unavailable:
            if self._refusal is not None:
                raise self._refusal from None
            raise

    def _pause_s(self) -> float:
        """Seconds to wait before another try: 0 after the first break, since another replica may be ready; then more.

        Many breaks count though tokens came between: one that ends after each token is not asked without a pause.
        """
        tries = max(self._failures + self._refusals, self._breaks - _MANY_BREAKS)
        if tries <= 1:
            return 0.0
        longest = min(self._retry.first_pause_s * 2 ** min(tries - 2, 16), self._retry.max_pause_s)
        return longest * random.uniform(0.5, 1.0)

    def left_s(self) -> float:
        """Seconds that the request has left. DeadlineExceeded when it has none."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise self._late()
        return left_s

    @contextlib.contextmanager
    def noting_what_breaks(self, replica: Replica) -> Iterator[None]:
        """Takes what a call on the replica fails with as a reason to go elsewhere. Raises what ends the request."""
        try:
            yield
        except Broken as error:
            self._failed(replica, error)
        except ResourceExhausted as error:
            self._refused(replica, error)
        except DeadlineExceeded as error:
            raise self._late() from error

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"The request took longer than the {self._timeout_s:g} s that this server allows.")

    def went_well(self) -> None:
        """Notes that tokens came."""
        self._failures = self._refusals = 0

    def _failed(self, replica: Replica, broken: Broken) -> None:
        """Notes a call that broke. Unavailable after too many in a row, Internal when engines fail on it."""
        blamed = not isinstance(broken, Differs)
        if blamed:
            self._replicas.broke(replica)
        if self._failures == 0:
            self._give_up_at = min(time.monotonic() + self._retry.patience_s, self._deadline)
        self._failures += 1
        self._breaks += 1
        # Whoever was full when the request came may have room by now, and is waited for like others.
        self._full.clear()
        self._refusal = None
        log.warning("a generate call broke", address=replica.address, reason=str(broken), failures=self._failures)
        if blamed and self._failures > self._retry.max_failures:
            raise Unavailable("The verify services failed on this request.")
        self._engines += broken.engine
        if self._engines >= _MAX_ENGINES:
            raise EnginesFailed("The engines of several verify services failed while they computed this request.")

    def _refused(self, replica: Replica, error: ResourceExhausted) -> None:
        """Notes a replica that is full. A new request tries the others and is refused; one under way waits its turn."""
        if self._failures == 0:
            self._full.append(replica)
            self._refusal = error
        elif time.monotonic() >= self._give_up_at:
            raise error
        else:
            self._refusals += 1
