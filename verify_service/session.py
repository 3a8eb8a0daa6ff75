"""One continuation of one prompt: its tokens, where its KV lies, and how it ends.

    waiting -> running -> finished
       ^__________|          (preempted: its pages go, its tokens stay)

Lengths count prompt and output together. The newest committed token has no KV yet.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from engine.radix_cache import Prefix
from outrider.sampling import SamplingParams
from outrider.speculation_count import SpeculationCount
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import Ids
from verify_service.grammar import GrammarState
from verify_service.session_sampler import SessionSampler


class Phase(enum.Enum):
    """Where a session stands."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a request asks of speculation, checked. None: the drafter's planner or flags decide."""

    enabled: bool
    algorithm: common_pb2.Algorithm
    num_steps: int | None
    num_draft_tokens: int | None
    accept_threshold_single: float
    accept_threshold_acc: float
    wire: common_pb2.SpeculativeParams


@dataclass(slots=True, eq=False)
class Session:
    """State of one continuation; only the engine changes it once it is submitted."""

    session_id: int
    prompt_len: int
    params: SamplingParams
    seed: int
    choice_index: int
    max_len: int  # prompt and output together; reaching it ends the output
    stop_ids: frozenset[int]
    speculation: Speculation
    sampler: SessionSampler
    tokens: Ids  # int32 [max_len]; the first committed_len are committed
    committed_len: int
    resumed_len: int = 0  # output that the client already had
    prediction: bytes = b""
    corpus_scope: str = ""
    cache_salt: bytes = b""
    priority: int = 0
    include_trees: bool = False
    logprobs: bool = False
    num_top_logprobs: int = 0
    grammar: GrammarState | None = None
    prompt_logprobs: list[verify_pb2.TokenLogprob] | None = None  # collected during prefill; None: not asked for
    shares_prefix_with: int | None = None
    traceparent: str = ""  # of the call, where it is traced

    phase: Phase = Phase.WAITING
    table_row: int = -1  # row of the slot table while it has one
    kv_len: int = 0  # positions whose KV is in the pool
    pages: list[int] = field(default_factory=list)  # of the positions from 0 on, cached ones first
    prefix: Prefix | None = None  # the cached pages among them, locked
    queried_len: int = 0  # positions of the prompt that the prefix cache was asked for at admission
    cached_len: int = 0  # those that it had
    num_overtaking: int = 0  # sessions behind it in the queue that were admitted before it
    admitted: int = 0  # order of admission; the latest is preempted first
    stats: SpeculationCount = field(default_factory=SpeculationCount)
    arrived_ns: int = field(default_factory=time.monotonic_ns)
    started_ns: int = 0
    first_token_ns: int = 0
    finish: verify_pb2.FinishReason | None = None
    stop_token: int | None = None

    @property
    def committed(self) -> Ids:
        """int32 [committed_len]: prompt and output."""
        return self.tokens[: self.committed_len]

    @property
    def output_len(self) -> int:
        """Tokens generated, resumed ones included; also the next token's output position."""
        return self.committed_len - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.max_len - self.committed_len

    @property
    def wants_prompt_rows(self) -> bool:
        """Whether logits of prompt rows are still wanted."""
        return self.prompt_logprobs is not None and self.output_len == 0

    @property
    def num_uncomputed(self) -> int:
        """Committed tokens without KV: 1 while it decodes."""
        return self.committed_len - self.kv_len

    def prompt_after(self, num_rows: int) -> Ids:
        """int32: the prompt's tokens that follow the next `num_rows` rows, one each; its last row has none."""
        first = self.kv_len + 1
        return self.tokens[first : min(first + num_rows, self.prompt_len)]

    def add_prompt_logprobs(self, following: Iterable[verify_pb2.TokenLogprob]) -> None:
        """Adds those of `prompt_after` a step's rows; the prompt's first token, which follows none, comes before."""
        assert self.prompt_logprobs is not None
        if not self.prompt_logprobs:
            self.prompt_logprobs.append(verify_pb2.TokenLogprob(token=int(self.tokens[0])))
        self.prompt_logprobs.extend(following)

    def drop_prompt_logprobs(self) -> None:
        """Drops those that follow rows without KV: these rows are computed again, and will add them again."""
        if self.prompt_logprobs is not None and self.output_len == 0:
            del self.prompt_logprobs[self.kv_len + 1 :]

    def commit(self, tokens: list[int]) -> list[int]:
        """Appends tokens up to the first that ends the output; returns those taken and sets `finish`.

        Where the grammar comes to a dead end, those before it.
        """
        if self.grammar is None and len(tokens) < self.remaining and self.stop_ids.isdisjoint(tokens):
            self._append(tokens)
            return tokens
        taken: list[int] = []
        for token in tokens:
            if self.grammar is not None and not self.grammar.commit(token):
                break
            self.tokens[self.committed_len] = token
            self.committed_len += 1
            taken.append(token)
            self.note_end()
            if self.finish is not None:
                break
        return taken

    def note_end(self) -> None:
        """Sets `finish` where the newest committed token ends the output."""
        token = int(self.tokens[self.committed_len - 1])
        if token in self.stop_ids and self.output_len > self.params.min_tokens:
            self.finish, self.stop_token = verify_pb2.FINISH_REASON_STOP, token
        elif self.grammar is not None and self.grammar.is_complete:
            self.finish = verify_pb2.FINISH_REASON_STOP
        elif self.remaining <= 0:
            self.finish = verify_pb2.FINISH_REASON_LENGTH

    def _append(self, tokens: list[int]) -> None:
        """One by one: they are few, and numpy is slow to begin."""
        buffer, end = self.tokens, self.committed_len
        for token in tokens:
            buffer[end] = token
            end += 1
        self.committed_len = end

    def timings_us(self) -> dict[str, int]:
        """Queue, prefill and decode time so far, for the wire's GenerateFinish."""
        now = time.monotonic_ns()
        started = self.started_ns or now
        first = self.first_token_ns or now
        return {
            "queue_us": max(0, started - self.arrived_ns) // 1000,
            "prefill_us": max(0, first - started) // 1000,
            "decode_us": max(0, now - first) // 1000,
        }


def token_buffer(committed: Ids, max_len: int) -> Ids:
    """int32 [max_len] that begins with `committed`; the rest takes no memory before it is written."""
    buffer = np.zeros(max(max_len, len(committed)), np.int32)
    buffer[: len(committed)] = committed
    return buffer
