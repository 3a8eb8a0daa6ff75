"""One choice of a generate stream as text: characters, stop strings, what is told of each token, counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from gateway.detokenizer import Detokenizer
from gateway.prediction import Prediction, PredictionMatch
from gateway.stop import StopMatcher
from gateway.totals import Totals
from outrider.speculation_count import SpeculationCount
from outrider.v1 import common_pb2, verify_pb2

Origin = Literal["accepted", "bonus", "target"]


@dataclass(frozen=True, slots=True)
class OutputRules:
    """How tokens become the text of an answer."""

    make_detokenizer: Callable[[], Detokenizer]
    stops: tuple[str, ...]
    pieces: bool = False  # whether deltas tell of each token
    min_tokens: int = 0  # within which no stop string ends an output
    prediction: Prediction | None = None  # what the caller thinks the output is


@dataclass(slots=True)
class Piece:
    """One token of the output, with the part of its text that is let out.

    `token` is None where the rest of a token follows of which a part was told before. `depth` is its place in the tree
    of step `step`, from 1; 0 for the target's own tokens.
    """

    token: int | None
    text: str
    step: int
    depth: int
    algorithm: common_pb2.Algorithm | None  # of the drafter whose tree the step verified
    logprob: verify_pb2.TokenLogprob | None
    ends: bool = False  # it ended the output and is no part of its text

    @property
    def origin(self) -> Origin:
        """A draft that was accepted, the target's own token after a tree, or one that nothing was drafted for."""
        if self.depth:
            return "accepted"
        return "target" if self.algorithm is None else "bonus"


@dataclass(slots=True)
class Delta:
    """What a response added to one choice. `finish_reason` comes with the last one."""

    choice: int
    text: str
    tokens: list[int]
    pieces: list[Piece] | None
    step: int
    tree: verify_pb2.VerifiedTree | None = None
    finish_reason: Literal["stop", "length"] | None = None
    matched: str | int | None = None  # the stop string or id


class ChoiceText:
    """One choice: feeds responses in, gives deltas out, counts, for `totals` too."""

    def __init__(self, choice: int, rules: OutputRules, totals: Totals | None = None) -> None:
        self.choice = choice
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.speculation = SpeculationCount()
        self.prompt_logprobs: list[verify_pb2.TokenLogprob] = []
        self.numerics_id = ""  # of the service that began it
        self.finished = False
        self._rules = rules
        self._totals = totals or Totals()
        self._prediction = PredictionMatch(rules.prediction) if rules.prediction is not None else None
        self._detokenizer = rules.make_detokenizer()
        self._stop = StopMatcher(rules.stops) if rules.stops else None
        self._held: deque[Piece] = deque()  # detokenised, not yet let out
        self._step = -1
        self._seen = SpeculationCount()  # of the call that runs, until verify tells its own count
        self._started = False

    def feed(self, response: verify_pb2.GenerateResponse) -> Delta:
        """The delta of one response of this choice."""
        if response.HasField("start"):
            self._begin_call(response)
        tokens = list(response.tokens)
        self._step += bool(tokens)
        delta = Delta(self.choice, "", [], [] if self._rules.pieces else None, self._step)
        if response.HasField("tree"):
            delta.tree = response.tree
        stopped = response.HasField("finish") and response.finish.HasField("stop_token_id")
        end = len(tokens) - 1 if stopped else None  # of a token that ends the output, whose text is no part of it
        pieces: list[str] = []
        for index, token in enumerate(tokens):
            delta.tokens.append(token)
            if index == end:
                if delta.pieces is not None:
                    self._held.append(replace(self._piece(response, index, ""), ends=True))
                continue
            text = self._detokenizer.push(token)
            if self._stop is None and delta.pieces is None:
                pieces.append(text)
                continue
            if delta.pieces is not None:
                self._held.append(self._piece(response, index, text))
            pieces.append(self._let_out(text, delta, self.completion_tokens + len(delta.tokens)))
            if self._stop is not None and self._stop.matched is not None:
                delta.finish_reason, delta.matched = "stop", self._stop.matched
                self._cut(delta)
                break
        self._count(response, delta.tokens)
        if delta.finish_reason is not None:
            self._end(None)
        elif response.HasField("finish"):
            pieces.append(self._finish(response.finish, delta))
        delta.text = "".join(pieces)
        return delta

    def _piece(self, response: verify_pb2.GenerateResponse, index: int, text: str) -> Piece:
        algorithm = response.algorithm if response.HasField("algorithm") else None
        logprob = response.logprobs[index] if response.logprobs else None
        depth = index + 1 if index < response.num_accepted else 0
        return Piece(response.tokens[index], text, self._step, depth, algorithm, logprob)

    def _let_out(self, text: str, delta: Delta, num_tokens: int) -> str:
        """What the stop matcher lets through now that `text` has come, which the first `num_tokens` tokens made."""
        out = text if self._stop is None else self._stop.push(text, may_end=num_tokens > self._rules.min_tokens)
        if delta.pieces is not None:
            delta.pieces += self._take(len(out))
        return out

    def _take(self, size: int) -> list[Piece]:
        """Pieces for the first `size` held characters. Tokens without text go with the next that has some."""
        taken: list[Piece] = []
        while size:
            piece = self._held.popleft()
            if len(piece.text) > size:
                self._held.appendleft(replace(piece, token=None, text=piece.text[size:], logprob=None))
                piece.text = piece.text[:size]
            taken.append(piece)
            size -= len(piece.text)
        return taken

    def _finish(self, finish: verify_pb2.GenerateFinish, delta: Delta) -> str:
        """The end as verify tells it; what was held back comes out now, unless it holds a stop string after all."""
        delta.finish_reason = "stop" if finish.reason == verify_pb2.FINISH_REASON_STOP else "length"
        if finish.HasField("stop_token_id"):
            delta.matched = finish.stop_token_id
        rest = self._detokenizer.finish()
        if delta.pieces is not None and rest:
            self._give_text(rest)
        tail = self._let_out(rest, delta, self.completion_tokens)
        if self._stop is not None:
            held = self._stop.finish()
            tail += held
            if delta.pieces is not None:
                delta.pieces += self._take(len(held))
            if self._stop.matched is not None:
                delta.finish_reason, delta.matched = "stop", self._stop.matched
                self._cut(delta)
        if delta.pieces is not None:
            delta.pieces += self._held  # tokens that never had text
        self._end(SpeculationCount.from_wire(finish.speculation))
        return tail

    def _cut(self, delta: Delta) -> None:
        """Tokens whose text a stop string took are told of like one that ends an output."""
        if delta.pieces is not None:
            delta.pieces += [replace(piece, text="", ends=True) for piece in self._held if piece.token is not None]
            self._held.clear()

    def _give_text(self, text: str) -> None:
        """Gives text that the detokenizer had kept back to the last token, but for one that ended the output."""
        for piece in reversed(self._held):
            if not piece.ends:
                piece.text += text
                return
        self._held.appendleft(Piece(None, text, self._step, 0, None, None))

    # ---- Counting

    def _begin_call(self, response: verify_pb2.GenerateResponse) -> None:
        """Begins a call: the first, or one that goes on where another broke."""
        if not self._started:
            self.cached_tokens = response.start.cached_tokens
            if self.choice == 0:  # which stands for its prompt
                self._totals.cached_tokens += self.cached_tokens
            self.numerics_id = response.start.numerics_id
            self.prompt_logprobs = list(response.prompt_logprobs)
        else:
            self._add_speculation(self._seen)
            self._seen = SpeculationCount()
        self._started = True

    def _count(self, response: verify_pb2.GenerateResponse, tokens: list[int]) -> None:
        """Counts a step, until verify tells its own count; what a stop string cut off is not counted."""
        self.completion_tokens += len(tokens)
        self._totals.completion_tokens += len(tokens)
        if self._prediction is not None:
            before = self._prediction.accepted
            self._prediction.feed(tokens)
            self._totals.accepted_prediction_tokens += self._prediction.accepted - before
        if tokens and response.HasField("num_drafted"):
            accepted = min(response.num_accepted, len(tokens))
            self._seen.count(drafted=response.num_drafted, accepted=accepted, committed=len(tokens))

    def _end(self, told: SpeculationCount | None) -> None:
        self.finished = True
        self._add_speculation(told or self._seen)

    def _add_speculation(self, count: SpeculationCount) -> None:
        self.speculation.add(count)
        self._totals.speculation.add(count)
