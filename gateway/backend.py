"""Generate calls that survive their replica: a broken stream goes on from the next token on another one.

What a client has been given is sent along as `resumed_tokens`, so nothing is repeated or lost; the seed is fixed before
the first call, so the tokens are those it would have seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
import time
from collections.abc import AsyncGenerator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from gateway.affinity import PromptKeys
from gateway.call_failures import Broken, Differs, NotOffered
from gateway.merge import merge
from gateway.replica import Replica
from gateway.replicas import ReplicaSet
from outrider.errors import DeadlineExceeded, Internal, OutriderError, ResourceExhausted, Unavailable
from outrider.telemetry import get_logger
from outrider.v1 import verify_pb2
from outrider.wire import num_ids, pack_ids, unpack_ids

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


class Backend:
    """Opens Generate calls on the replicas."""

    def __init__(self, replicas: ReplicaSet, retry: RetryPolicy) -> None:
        self.replicas = replicas
        self._retry = retry

    def check_room(self) -> None:
        """Unavailable or ResourceExhausted when a call made now would be refused."""
        self.replicas.pick()

    def generate(
        self, request: verify_pb2.GenerateRequest, *, timeout_s: float, apart: bool = False,
        ended: AbstractSet[int] = frozenset(), numerics: Numerics | None = None,
    ) -> AsyncGenerator[verify_pb2.GenerateResponse]:  # fmt: skip
        """All choices of a request, as they come. A choice's `start` comes again after each failover.

        The request must name a seed. `apart` opens a call for each choice, so that one can be ended alone; otherwise
        they share a prefill. `ended` grows while it is read: choices that the caller wants no more of, whose calls end
        with their next response. `numerics` are shared by calls whose outputs must be computed alike. Closing the
        iterator cancels all. Raises what verify answers, Unavailable when no replica can go on, DeadlineExceeded after
        `timeout_s`.
        """
        route = _Route(self.replicas, self._retry, timeout_s, request, numerics or Numerics())
        if apart and request.num_choices > 1:
            parts = [_only(request, index, []) for index in _given(request)]
            return merge([self._follow(part, route.fork(), ended) for part in parts])
        return self._follow(request, route, ended)

    async def _follow(
        self, request: verify_pb2.GenerateRequest, route: _Route, ended: AbstractSet[int]
    ) -> AsyncGenerator[verify_pb2.GenerateResponse]:
        """One call's choices to their end, over as many replicas as it takes."""
        choices = _Choices(request, route, ended)
        again: Replica | None = None  # which did not take the call on its stream
        try:
            while not choices.ended:
                alone, replica, again = again is not None, again or await route.next_replica(), None
                left_s = route.deadline - time.monotonic()
                if left_s <= 0:
                    raise route.late()
                call = replica.begin(request, left_s, alone=alone)
                try:
                    while responses := await call.take():
                        replica.missed = 0  # whatever its probes say
                        for response in responses:
                            if choices.take(response, replica):
                                yield response
                        if choices.ended:
                            return
                    route.failed(replica, Broken("the stream ended before the output"))
                except Broken as error:
                    route.failed(replica, error)
                except NotOffered:
                    again = replica if replica.serving else None  # it may have gone from the addresses meanwhile
                except ResourceExhausted as error:
                    route.refused(replica, error)
                except DeadlineExceeded as error:
                    raise route.late() from error
                finally:
                    replica.end(call)
                if not choices.progress:
                    continue
                left = choices.left()
                if len(left) > 1:
                    rest = [self._follow(_only(request, *choice), route.fork(), ended) for choice in left]
                    async with contextlib.aclosing(merge(rest)) as responses:
                        async for response in responses:
                            yield response
                    return
                if left:
                    request = choices.request = _only(request, *left[0])
        except OutriderError:
            if not choices.ended:  # else nobody wants what failed
                raise


class _Choices:
    """What has come of a call's choices, over all replicas that had it."""

    def __init__(self, request: verify_pb2.GenerateRequest, route: _Route, ended: AbstractSet[int]) -> None:
        self.request = request  # the one under way
        self.progress = False  # some tokens came
        self._route = route
        self._given = _given(request)  # of those whose end has not come
        self._ended = ended
        self._numerics_id = ""  # of the replica that answers

    @property
    def ended(self) -> bool:
        """Whether nothing is to come that the caller wants."""
        return self._given.keys() <= self._ended

    def left(self) -> list[tuple[int, list[int]]]:
        """The choices that go on elsewhere, and the tokens that each has."""
        return [choice for choice in self._given.items() if choice[0] not in self._ended]

    def take(self, response: verify_pb2.GenerateResponse, replica: Replica) -> bool:
        """Takes a response in; whether the caller is to have it. Broken for what no client may get."""
        index = response.choice_index
        if index not in self._given or index in self._ended:
            return False
        if response.HasField("start"):
            self._numerics_id = response.start.numerics_id
            replica.check_same(response.start)
        if tokens := response.tokens:
            _check(response, len(self._given[index]), self.request, replica)
            self._route.numerics.keep_to(self._numerics_id)
            self.progress = True
            self._given[index].extend(tokens)
            self._route.went_well()
        if response.HasField("finish"):
            del self._given[index]
        return True


class _Route:
    """Where one request has been, and where it goes next."""

    def __init__(
        self, replicas: ReplicaSet, retry: RetryPolicy, timeout_s: float, request: verify_pb2.GenerateRequest,
        numerics: Numerics,
    ) -> None:  # fmt: skip
        self.deadline = time.monotonic() + timeout_s
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
        self._give_up_at = self.deadline

    def fork(self) -> _Route:
        """A route for one choice that goes on from here."""
        route = copy.copy(self)
        route._refusals, route._full, route._refusal = 0, [], None
        return route

    async def next_replica(self) -> Replica:
        """A replica to try now. Before anything broke there is one at once or never; then a sure one is waited for."""
        if self._failures == 0:
            return self._pick()
        with self._replicas.waiting():
            await asyncio.sleep(self._pause_s())
            while True:
                try:
                    return self._pick()
                except (Unavailable, ResourceExhausted):
                    left_s = self._give_up_at - time.monotonic()
                    if left_s <= 0 or (self._replicas.draining and not self._replicas.serving):
                        raise
                    await self._replicas.wait_for_change(min(left_s, self._retry.max_pause_s))

    def _pick(self) -> Replica:
        try:
            return self._replicas.pick(
                numerics_id=self.numerics.id,
                avoid=self._full,
                prompt=self._prompt,
                num_positions=self._num_positions,
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

    def late(self) -> DeadlineExceeded:
        """The error for a request whose time is over."""
        return DeadlineExceeded(f"The request took longer than the {self._timeout_s:g} s that this server allows.")

    def went_well(self) -> None:
        """Notes that tokens came."""
        self._failures = self._refusals = 0

    def failed(self, replica: Replica, broken: Broken) -> None:
        """Notes a call that broke. Unavailable after too many in a row, Internal when engines fail on it."""
        blamed = not isinstance(broken, Differs)
        if blamed:
            self._replicas.broke(replica)
        if self._failures == 0:
            self._give_up_at = min(time.monotonic() + self._retry.patience_s, self.deadline)
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

    def refused(self, replica: Replica, error: ResourceExhausted) -> None:
        """Notes a replica that is full. A new request tries the others and is refused; one under way waits its turn."""
        if self._failures == 0:
            self._full.append(replica)
            self._refusal = error
        elif time.monotonic() >= self._give_up_at:
            raise error
        else:
            self._refusals += 1


def _check(
    response: verify_pb2.GenerateResponse, num_given: int, request: verify_pb2.GenerateRequest, replica: Replica
) -> None:
    """Broken where a replica gives what no client may get: more tokens than were asked for, or none of the model's."""
    sampling, tokens = request.sampling, response.tokens
    if request.logprobs and len(response.logprobs) != len(tokens):
        raise Broken(f"{len(response.logprobs)} log-probabilities came for {len(tokens)} tokens")
    if sampling.HasField("max_tokens") and num_given + len(tokens) > sampling.max_tokens:
        raise Broken(f"{num_given + len(tokens)} tokens came, of {sampling.max_tokens} that were asked for")
    vocab_size = 0 if replica.info is None else replica.info.model.vocab_size
    if vocab_size and max(tokens) >= vocab_size:
        raise Broken(f"token {max(tokens)} came, of a vocabulary of {vocab_size}")


def _given(request: verify_pb2.GenerateRequest) -> dict[int, list[int]]:
    """The request's choices, and the tokens that each has."""
    first = request.first_choice_index
    resumed = unpack_ids(request.resumed_tokens, field="resumed_tokens").tolist()
    return {first + index: list(resumed) for index in range(request.num_choices)}


def _only(request: verify_pb2.GenerateRequest, choice_index: int, tokens: Sequence[int]) -> verify_pb2.GenerateRequest:
    """The request for one of its choices alone, which has `tokens` already."""
    alone = verify_pb2.GenerateRequest()
    alone.CopyFrom(request)
    alone.num_choices = 1
    alone.first_choice_index = choice_index
    alone.resumed_tokens = pack_ids(tokens)
    return alone
