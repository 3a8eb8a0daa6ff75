"""Continuous batching for making data: many completions at once, each as if it ran alone.

A row of the batch belongs to one conversation at a time and keeps its KV between turns. What every conversation starts
with (the system prompt) is computed once and shared. Knows ids only; what they mean, the conversations know.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from engine.batch import Segment
from engine.runner import ModelRunner
from kernels.philox import COIN_LANE, uniform
from kernels.sampling import Filters, choose

GREEDY = Filters(temperature=0.0)
# An answer that repeats itself this long says nothing new: it ends there.
LOOP_TOKENS = 48
LOOP_PERIODS = range(1, 17)
PREFILL_TOKENS = 512  # of prompts, in a step


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion to make: `prompt` ids (the conversation so far included), and how to go on from them."""

    prompt: Sequence[int]
    max_tokens: int
    stops: frozenset[int]
    filters: Filters = GREEDY
    seed: int = 0
    cuts_loops: bool = True
    """Whether it ends when it repeats itself."""
    wants_states: bool = False


@dataclass(frozen=True, slots=True)
class Completed:
    """New ids, the stop id included; `reason`: stop, length, loop or context.

    states [prompt and new ids but the last, width]: the runner's features, where they were wanted and it has any.
    """

    tokens: list[int]
    reason: str
    states: torch.Tensor | None = None


Conversation = Generator[Completion, Completed, Any]
"""Yields what it wants completed, is sent the completion, and returns its result."""


@dataclass(slots=True)
class _Row:
    """A place in the batch: the conversation that has it, and the tokens whose KV it holds."""

    index: int
    cached: list[int] = field(default_factory=list)
    shares: bool = False
    """Whether its first positions are the shared ones."""
    conversation: Conversation | None = None
    asked: Completion | None = None
    prompt: list[int] = field(default_factory=list)
    new: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """All that this row's next token depends on."""
        return self.prompt + self.new

    @property
    def pending(self) -> int:
        """Tokens whose KV does not exist yet."""
        return len(self.prompt) + len(self.new) - len(self.cached)


class Completer:
    """Runs conversations over a model's runner, as many at a time as the runner has table rows.

    The pool needs max_len slots for each row and as many for the shared start.
    """

    def __init__(self, runner: ModelRunner, *, shared: Sequence[int] = ()) -> None:
        num_rows, max_len = runner.slot_table.shape
        if runner.pool.num_slots < (num_rows + 1) * max_len:
            raise ValueError(f"{num_rows} rows of {max_len} need {(num_rows + 1) * max_len} slots")
        self.runner = runner
        self.max_len = max_len
        self._shared = list(shared)
        self._shared_slots = np.arange(num_rows * max_len, num_rows * max_len + len(shared), dtype=np.int32)
        self._own_slots = np.arange(num_rows * max_len, dtype=np.int32).reshape(num_rows, max_len)
        self._rows = [_Row(index) for index in range(num_rows)]
        if self._shared:
            runner.slot_table[0, : len(shared)] = self._shared_slots
            runner.forward([Segment(0, 0, np.array(shared, np.int32), self._shared_slots)])
        self.num_generated = 0

    def run(self, conversations: Iterator[Conversation]) -> Iterator[Any]:
        """Runs conversations; what they return, in the order in which they end."""
        while True:
            for row in self._rows:
                while row.conversation is None and (started := next(conversations, None)) is not None:
                    yield from self._advance(row, started, None)
            active = [row for row in self._rows if row.conversation is not None]
            if not active:
                return
            for row, token in self._step(active):
                ended = self._take(row, token)
                if ended is not None and row.conversation is not None:
                    yield from self._advance(row, row.conversation, ended)

    def _advance(self, row: _Row, conversation: Conversation, completed: Completed | None) -> Iterator[Any]:
        """Runs a conversation up to the next completion that it wants, or to its end, which is yielded."""
        try:
            while True:
                asked = next(conversation) if completed is None else conversation.send(completed)
                if 0 < len(asked.prompt) < self.max_len:
                    break
                completed = Completed([], "context")
        except StopIteration as ended:
            row.conversation = row.asked = None
            yield ended.value
            return
        row.conversation, row.asked = conversation, asked
        row.prompt, row.new = list(asked.prompt), []
        self._keep_prefix(row)

    def _keep_prefix(self, row: _Row) -> None:
        """Keeps the KV at hand that this prompt starts with, its last token aside, whose logits are needed."""
        table, count = self.runner.slot_table[row.index], len(self._shared)
        shares = count > 0 and row.prompt[:count] == self._shared
        kept = _common(row.cached, row.prompt) if shares == row.shares else 0
        table[:] = self._own_slots[row.index]
        if shares:
            table[:count] = self._shared_slots
            kept = max(kept, count)
        row.shares = shares
        row.cached = row.prompt[: min(kept, len(row.prompt) - 1)]

    def _step(self, active: list[_Row]) -> list[tuple[_Row, int]]:
        """One forward pass: a token of every row that decodes, and prompts as far as the step's budget goes."""
        budget, segments, drawing = PREFILL_TOKENS, [], []
        for row in active:
            count = row.pending
            if count > 1:
                count = min(count, budget)
                budget -= count
            if count == 0:
                continue
            start = len(row.cached)
            tokens = row.tokens[start : start + count]
            is_last = start + count == len(row.prompt) + len(row.new)
            slots = self.runner.slot_table[row.index, start : start + count].copy()
            segments.append(Segment(row.index, start, np.array(tokens, np.int32), slots, num_logits=int(is_last)))
            row.cached += tokens
            if is_last:
                drawing.append(row)
        logits = self.runner.forward(segments)
        return list(zip(drawing, self._draw(drawing, logits), strict=True))

    def _draw(self, rows: list[_Row], logits: torch.Tensor) -> list[int]:
        tokens = logits.argmax(dim=-1).tolist()
        sampled = [i for i, row in enumerate(rows) if row.asked is not None and not row.asked.filters.is_greedy]
        if sampled:
            asked = [completion for i in sampled if (completion := rows[i].asked) is not None]
            coins = uniform(
                np.array([one.seed for one in asked], np.uint64), 0, np.array([len(rows[i].new) for i in sampled]),
                COIN_LANE,
            )  # fmt: skip
            chosen = choose(logits[sampled], [one.filters for one in asked], coins).tolist()
            for i, token in zip(sampled, chosen, strict=True):
                tokens[i] = token
        return tokens

    def _take(self, row: _Row, token: int) -> Completed | None:
        """Adds a token; the completion when it ended with it."""
        assert row.asked is not None
        row.new.append(token)
        self.num_generated += 1
        if token in row.asked.stops:
            return self._completed(row, "stop")
        if len(row.new) >= row.asked.max_tokens:
            return self._completed(row, "length")
        if len(row.prompt) + len(row.new) >= self.max_len:
            return self._completed(row, "context")
        return self._completed(row, "loop") if row.asked.cuts_loops and is_looping(row.new) else None

    def _completed(self, row: _Row, reason: str) -> Completed:
        """Features lie in the pool where keys and values do."""
        pool, states = self.runner.features, None
        if pool is not None and row.asked is not None and row.asked.wants_states:
            slots = torch.from_numpy(self.runner.slot_table[row.index, : len(row.cached)].astype(np.int64))
            states = pool[slots.to(pool.device)].cpu()
        return Completed(row.new, reason, states)


def is_looping(tokens: list[int]) -> bool:
    """Whether the last LOOP_TOKENS tokens are one short phrase again and again; looked at now and then."""
    if len(tokens) < LOOP_TOKENS or len(tokens) % 8:
        return False
    tail = tokens[-LOOP_TOKENS:]
    return any(tail[period:] == tail[:-period] for period in LOOP_PERIODS)


def _common(left: list[int], right: list[int]) -> int:
    """Length of the common start."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
