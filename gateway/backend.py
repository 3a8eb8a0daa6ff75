"""Generate calls that survive their replica: a broken stream goes on from the next token on another one.

What a client has been given is sent along as `resumed_tokens`, so nothing is repeated or lost; the seed is fixed before
the first call, so the tokens are those it would have seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from collections.abc import Set as AbstractSet

from gateway.call_failures import Broken, NotOffered
from gateway.merge import merge
from gateway.replica import Replica
from gateway.replicas import ReplicaSet
from gateway.route import Numerics, RetryPolicy, Route
from outrider.errors import OutriderError
from outrider.telemetry import get_logger
from outrider.v1 import verify_pb2
from outrider.wire import pack_ids, unpack_ids

log = get_logger(__name__)


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
        route = Route(self.replicas, self._retry, timeout_s, request, numerics or Numerics())
        if apart and request.num_choices > 1:
            return self._apart(request, list(_given(request).items()), route, ended)
        return self._follow(request, route, ended)

    async def _follow(
        self, request: verify_pb2.GenerateRequest, route: Route, ended: AbstractSet[int]
    ) -> AsyncGenerator[verify_pb2.GenerateResponse]:
        """One call's choices to their end, over as many replicas as it takes."""
        choices = _Choices(request, route, ended)
        again: Replica | None = None  # which did not take the call on its stream
        try:
            while not choices.ended:
                alone = again is not None
                replica, again = again or await route.next_replica(choices.request.num_choices), None
                call = replica.begin(choices.request, route.left_s(), alone=alone)
                try:
                    with route.noting_what_breaks(replica):
                        while responses := await call.take():
                            replica.missed = 0  # whatever its probes say
                            for response in responses:
                                if choices.take(response, replica):
                                    yield response
                            if choices.ended:
                                return
                        raise Broken("the stream ended before the output")
                except NotOffered:
                    again = replica if replica.serving else None  # it may have gone from the addresses meanwhile
                finally:
                    replica.end(call)
                if not choices.progress:
                    continue
                left = choices.left()
                if len(left) > 1:
                    async with contextlib.aclosing(self._apart(choices.request, left, route, ended)) as responses:
                        async for response in responses:
                            yield response
                    return
                if left:
                    choices.request = _only(choices.request, *left[0])
        except OutriderError:
            if not choices.ended:  # else nobody wants what failed
                raise

    def _apart(
        self, request: verify_pb2.GenerateRequest, choices: Sequence[tuple[int, list[int]]], route: Route,
        ended: AbstractSet[int],
    ) -> AsyncGenerator[verify_pb2.GenerateResponse]:  # fmt: skip
        """A call for each of these choices, which has its tokens already."""
        return merge([self._follow(_only(request, *choice), route.fork(), ended) for choice in choices])


class _Choices:
    """What has come of a call's choices, over all replicas that had it."""

    def __init__(self, request: verify_pb2.GenerateRequest, route: Route, ended: AbstractSet[int]) -> None:
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
