"""What one HTTP request uses: told to the metrics, and taken from its caller's rate.

A prompt is taken from the rate before its call is made, and given back where verify refuses the request; metrics count
what began.
"""

from __future__ import annotations

from typing import Any

from gateway.callers import Caller
from gateway.metrics import Metrics, Stopwatch
from gateway.text_stream import Delta
from outrider.speculation_count import SpeculationCount


class Account:
    """The account of all answers of one request. `state` is the exchange's: it has the caller and the time when the
    request came; it gets the finish reason, and `begun` once a response has come.

    `empty`: the client gets no tokens, and none count. `probe`: nothing counts.
    """

    def __init__(self, metrics: Metrics, state: dict[str, Any], *, empty: bool = False, probe: bool = False) -> None:
        self._metrics = metrics
        self._state = state
        self._empty = empty
        self._probe = probe

    def begin(self, prompt_len: int) -> Entry:
        """Begins the account of an answer that is asked for: its prompt counts at once."""
        caller: Caller | None = None if self._probe else self._state.get("caller")
        if caller is not None:
            caller.use(prompt_len)
        return Entry(self._metrics, self._state, caller, prompt_len, empty=self._empty, probe=self._probe)


class Entry:
    """The account of one answer."""

    def __init__(
        self, metrics: Metrics, state: dict[str, Any], caller: Caller | None, prompt_len: int, *, empty: bool,
        probe: bool,
    ) -> None:  # fmt: skip
        self._metrics = metrics
        self._state = state
        self._caller = caller
        self._prompt_len = prompt_len
        self._empty = empty
        self._probe = probe
        self._watch = Stopwatch(metrics, state["began"])
        self._begun = False

    def add(self, delta: Delta) -> None:
        """Counts a response that came: with tokens, or an end."""
        self._begun = self._state["begun"] = True
        if delta.tokens and not (self._empty or self._probe):
            self._watch.tokens(delta.choice)
            self._metrics.num_tokens += len(delta.tokens)
            if self._caller is not None:
                self._caller.use(len(delta.tokens))
        if delta.finish_reason is not None:
            self._state["finish_reason"] = delta.finish_reason

    def failed(self) -> None:
        """Notes that the call failed: the request is refused if that was before the answer began."""
        if not self._begun:
            self._state["refused"] = True

    def end(self, num_tokens: int, cached_tokens: int, speculation: SpeculationCount, *, complete: bool) -> None:
        """Notes the answer's end, or that its client went; times count of whole answers only."""
        if not self._begun:
            # Other prompts of a request that is refused have not failed. Who hangs up pays: verify may have been at it.
            if self._caller is not None and self._state.get("refused"):
                self._caller.give_back(self._prompt_len)
            return
        if self._probe:
            return
        metrics = self._metrics
        metrics.prompt_tokens.inc(self._prompt_len)
        metrics.cache_hits.inc(cached_tokens)
        metrics.prompt_size.observe(self._prompt_len)
        metrics.answer_size.observe(0 if self._empty else num_tokens)
        metrics.count_speculation(speculation)
        if complete:
            self._watch.done()
