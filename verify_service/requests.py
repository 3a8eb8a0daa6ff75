"""From a GenerateRequest to sessions: every check that needs only the request and the model."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.config import ModelConfig
from outrider.errors import RETRY_SOON_S, InvalidArgument, ResourceExhausted
from outrider.sampling import SamplingParams
from outrider.tree_limits import MAX_WISH, WISHES, check_wishes
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import (
    INT31_MAX,
    MAX_MESSAGE_BYTES,
    MAX_NAME_CHARS,
    MAX_TOP_LOGPROBS,
    Ids,
    check_token_ids,
    unpack_ids,
)
from verify_service.grammar import GrammarState
from verify_service.grammar_compiler import MAX_ANEW, Compiled, GrammarCompiler
from verify_service.session import Session, Speculation, token_buffer
from verify_service.session_sampler import SessionSampler

# Those of a prompt come in one message: the room in it, and what one takes at most.
_LOGPROB_ROOM, _LOGPROB_BYTES = MAX_MESSAGE_BYTES - 2**21, 15


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """Limits on requests, fixed at start."""

    context_length: int
    max_choices: int
    max_verify_nodes: int
    accept_thresholds: tuple[float, float] = 1.0, 1.0  # single and acc, of requests that name none


class _Wanted(NamedTuple):
    """What a request asks for, checked; its grammar aside."""

    prompt: Ids
    resumed: Ids
    hint: bytes
    num_choices: int
    params: SamplingParams
    max_len: int
    speculation: Speculation


class SessionFactory:
    """Makes checked sessions; ids are unique in this process."""

    def __init__(self, config: ModelConfig, bounds: RequestBounds, compiler: GrammarCompiler) -> None:
        self._config = config
        self._bounds = bounds
        self._compiler = compiler
        self._ids = itertools.count(1)

    def build(self, request: verify_pb2.GenerateRequest, compiled: Compiled | None = None) -> list[Session]:
        """One session per choice. InvalidArgument naming the field, the value and the limit.

        compiled: the request's grammar; None where there is none, or this thread may wait for it.
        """
        wanted = self._check(request)
        params, prompt, resumed, speculation = wanted.params, wanted.prompt, wanted.resumed, wanted.speculation
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        own_ends = () if params.ignore_eos else self._config.eos_token_ids
        stop_ids = frozenset((*params.stop_token_ids, *own_ends))
        committed = np.concatenate([prompt, resumed])
        sessions: list[Session] = []
        for choice in range(request.first_choice_index, request.first_choice_index + wanted.num_choices):
            grammar = self._grammar(request, compiled, resumed)
            sampler = sessions[0].sampler.for_choice(choice, grammar) if sessions else SessionSampler(
                params, grammar=grammar, seed=seed, choice_index=choice, stop_ids=stop_ids, prompt=prompt,
                resumed=resumed, threshold_single=speculation.accept_threshold_single,
                threshold_acc=speculation.accept_threshold_acc,
            )  # fmt: skip
            session = Session(
                session_id=next(self._ids), prompt_len=len(prompt), params=params, seed=seed, choice_index=choice,
                max_len=wanted.max_len, stop_ids=stop_ids, speculation=speculation, sampler=sampler,
                tokens=token_buffer(committed, wanted.max_len), committed_len=len(committed),
                resumed_len=len(resumed), prediction=wanted.hint, corpus_scope=request.corpus_scope,
                cache_salt=request.cache_salt.encode(), priority=request.priority,
                include_trees=request.include_trees, grammar=grammar, logprobs=request.logprobs,
                num_top_logprobs=request.top_logprobs,
                prompt_logprobs=[] if request.prompt_logprobs and not len(resumed) else None,
                shares_prefix_with=sessions[0].session_id if sessions else None,
            )  # fmt: skip
            sessions.append(session)
        return sessions

    async def build_with_grammar(self, request: verify_pb2.GenerateRequest) -> list[Session]:
        """Builds off the event loop: compiling a grammar may take seconds."""
        self._check(request)  # nothing is compiled for one that is refused
        compiled = await self._compiler.settle(request.sampling.grammar)
        return await asyncio.to_thread(self.build, request, compiled)

    def close(self) -> None:
        """Compiles no more grammars; waits for nothing."""
        self._compiler.close()

    def _check(self, request: verify_pb2.GenerateRequest) -> _Wanted:
        prompt = self._ids_of(request.prompt_tokens, "prompt_tokens")
        if not len(prompt):
            raise InvalidArgument("prompt_tokens is empty; at least one token is needed", field="prompt_tokens")
        resumed = self._ids_of(request.resumed_tokens, "resumed_tokens")
        hint = request.prediction_tokens[: 4 * self._bounds.context_length]  # what is longer may fit another replica
        self._ids_of(hint, "prediction_tokens")
        num_choices = request.num_choices if request.HasField("num_choices") else 1
        self._check_request(request, num_choices, len(resumed))
        self._check_prompt_logprobs(request, len(prompt))
        params = SamplingParams.from_proto(request.sampling, vocab_size=self._config.vocab_size)
        max_len = self._max_len(params, len(prompt), len(resumed))
        return _Wanted(prompt, resumed, hint, num_choices, params, max_len, self._speculation(request.speculative))

    def _ids_of(self, data: bytes, field: str) -> Ids:
        if len(data) > 4 * self._bounds.context_length:
            raise InvalidArgument(
                f"{field} has {len(data) // 4} tokens; the context holds {self._bounds.context_length}",
                field=field,
                code="context_length_exceeded",
            )
        ids = unpack_ids(data, field=field)
        check_token_ids(ids, vocab_size=self._config.vocab_size, field=field)
        return ids

    def _check_request(self, request: verify_pb2.GenerateRequest, num_choices: int, resumed_len: int) -> None:
        if not 1 <= num_choices <= self._bounds.max_choices:
            raise InvalidArgument(
                f"num_choices is {num_choices}; it must be from 1 to {self._bounds.max_choices}", field="num_choices"
            )
        last = INT31_MAX - num_choices
        if request.first_choice_index > last:
            raise InvalidArgument(
                f"first_choice_index is {request.first_choice_index}; with num_choices {num_choices} it must be at "
                f"most {last}",
                field="first_choice_index",
            )
        if resumed_len and num_choices != 1:
            raise InvalidArgument("resumed_tokens needs num_choices = 1", field="resumed_tokens")
        for name in ("request_id", "corpus_scope", "cache_salt"):
            length = len(getattr(request, name))
            if length > MAX_NAME_CHARS:
                raise InvalidArgument(
                    f"{name} has {length} characters; it must have at most {MAX_NAME_CHARS}", field=name
                )
        if request.top_logprobs > MAX_TOP_LOGPROBS:
            raise InvalidArgument(
                f"top_logprobs is {request.top_logprobs}; it must be from 0 to {MAX_TOP_LOGPROBS}", field="top_logprobs"
            )
        if request.top_logprobs and not (request.logprobs or request.prompt_logprobs):
            raise InvalidArgument("top_logprobs needs logprobs or prompt_logprobs", field="top_logprobs")

    def _check_prompt_logprobs(self, request: verify_pb2.GenerateRequest, prompt_len: int) -> None:
        most = _LOGPROB_ROOM // (prompt_len * _LOGPROB_BYTES) - 1
        if request.prompt_logprobs and most < 0:
            raise InvalidArgument(
                f"prompt_logprobs of {prompt_len} tokens are more than an answer holds; the prompt may have at most "
                f"{_LOGPROB_ROOM // _LOGPROB_BYTES} tokens with them",
                field="prompt_logprobs",
            )
        if request.prompt_logprobs and request.top_logprobs > most:
            raise InvalidArgument(
                f"top_logprobs is {request.top_logprobs}; with prompt_logprobs of {prompt_len} tokens it must be "
                f"from 0 to {most}",
                field="top_logprobs",
            )

    def _grammar(
        self, request: verify_pb2.GenerateRequest, compiled: Compiled | None, resumed: Ids
    ) -> GrammarState | None:
        if not request.sampling.HasField("grammar"):
            return None
        state = self._compiler.compile(request.sampling.grammar, compiled)
        for place, token in enumerate(resumed.tolist()):
            if not (state.commit(token) or (_renewed(state) and state.commit(token))):
                raise InvalidArgument(
                    f"resumed_tokens[{place}] is {token}, which the grammar forbids there", field="resumed_tokens"
                )
        return state

    def _max_len(self, params: SamplingParams, prompt_len: int, resumed_len: int) -> int:
        context = self._bounds.context_length
        if prompt_len >= context:
            raise InvalidArgument(
                f"the prompt has {prompt_len} tokens; the context holds {context}, the output included",
                field="prompt_tokens",
                code="context_length_exceeded",
            )
        max_len = context if params.max_tokens is None else min(context, prompt_len + params.max_tokens)
        if prompt_len + resumed_len > max_len:
            raise InvalidArgument(
                f"resumed_tokens has {resumed_len} tokens; max_tokens and the context leave {max_len - prompt_len}",
                field="resumed_tokens",
            )
        return max_len

    def _speculation(self, pb: common_pb2.SpeculativeParams) -> Speculation:
        algorithm = pb.algorithm if pb.HasField("algorithm") else common_pb2.ALGORITHM_UNSPECIFIED
        if algorithm not in common_pb2.Algorithm.values():
            known = ", ".join(common_pb2.Algorithm.keys()[1:])
            raise InvalidArgument(
                f"speculative.algorithm is {algorithm}; known are {known}", field="speculative.algorithm"
            )
        check_wishes(pb, MAX_WISH)
        wire = common_pb2.SpeculativeParams()
        wire.CopyFrom(pb)
        wire.DiscardUnknownFields()  # drafters are sent it, and none of what has no limit
        for name in WISHES:
            if pb.HasField(name):  # which a replica with smaller limits must not fail on
                setattr(wire, name, min(getattr(pb, name), self._bounds.max_verify_nodes + 1))
        thresholds: list[float] = []
        names = ("accept_threshold_single", True), ("accept_threshold_acc", False)
        for (name, with_zero), usual in zip(names, self._bounds.accept_thresholds, strict=True):
            value = getattr(pb, name) if pb.HasField(name) else usual
            if pb.HasField(name) and (not 0.0 <= value <= 1.0 or (value == 0.0 and not with_zero)):
                bounds = "from 0 to 1" if with_zero else "above 0, and at most 1"
                raise InvalidArgument(
                    f"speculative.{name} is {value}; it must be {bounds}", field=f"speculative.{name}"
                )
            thresholds.append(value)
        return Speculation(
            enabled=pb.enabled if pb.HasField("enabled") else True,
            algorithm=algorithm,
            num_steps=wire.num_steps if pb.HasField("num_steps") else None,
            num_draft_tokens=wire.num_draft_tokens if pb.HasField("num_draft_tokens") else None,
            accept_threshold_single=thresholds[0],
            accept_threshold_acc=thresholds[1],
            wire=wire,
        )


def _renewed(state: GrammarState) -> bool:
    """Whether another output had spent the grammar's lexer; it has one of its own then, for which this thread waits."""
    if not state.is_spent:
        return False
    matcher = state.renew()
    if matcher is None:
        raise ResourceExhausted(
            f"{MAX_ANEW} outputs wait for their grammars to be compiled once more; try again later",
            retry_after_s=RETRY_SOON_S,
        )
    state.take(matcher.result())
    return True
