"""Where a session's newest tokens stood before in its own text or its request's prediction, and what followed there.

How far that comes true is learnt from the text alone: wherever a match is found, what is committed next tells whether a
copy would have come true, also where none was made.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draft_service.drafters.compiled import compiled
from outrider.wire import Ids

MIN_MATCH = 3  # newest tokens that must have stood there before
_MOST_MATCH = 16  # longer matches say no more
_PRIOR_WEIGHT, _WINDOW = 8.0, 128.0  # tries by match length; those after which old ones fade
_SHARED_WEIGHT = 8.0  # tries of its own after which a session counts as much as all others
_FIRST_SIZE = 1024

Table = NDArray[np.int32]


class CopyRates:
    """How often the next token is that of the copy, by the length of the match so far.

    shared: of all sessions, where this is one's own.
    """

    def __init__(self, shared: CopyRates | None = None) -> None:
        self._shared = shared
        self._tries = [0.0 if shared else _PRIOR_WEIGHT] * (_MOST_MATCH + 1)
        self._hits = [tries * length / (length + 1) for length, tries in enumerate(self._tries)]

    def chances(self, match_len: int, count: int, least: float) -> list[float]:
        """Chances that a copy after such a match comes true to each of at most `count` tokens; none below `least`."""
        chances: list[float] = []
        chance = 1.0
        for length in range(match_len, match_len + count):
            chance *= self._rate(min(length, _MOST_MATCH))
            if chance < least:
                break
            chances.append(chance)
        return chances

    def observe(self, match_len: int, hits: int, *, missed: bool) -> None:
        """After such a match so many tokens were the copy's, and then, if it missed, one was not."""
        for length in range(match_len, match_len + hits + missed):
            at = min(length, _MOST_MATCH)
            self._tries[at] += 1.0
            self._hits[at] += length < match_len + hits
            if self._tries[at] > _WINDOW:
                self._tries[at] /= 2
                self._hits[at] /= 2
        if self._shared is not None:
            self._shared.observe(match_len, hits, missed=missed)

    def _rate(self, at: int) -> float:
        if self._shared is None:
            return self._hits[at] / self._tries[at]
        return (_SHARED_WEIGHT * self._shared._rate(at) + self._hits[at]) / (_SHARED_WEIGHT + self._tries[at])


class Text:
    """One session's, its prediction between prompt and answer. match_len: of the newest tokens; 0: there was none."""

    def __init__(self, rates: CopyRates, prediction: Ids, prompt_len: int) -> None:
        self.rates = rates
        self.match_len = 0
        self._prediction = prediction
        self._prompt_len = prompt_len
        self._tokens = self._buffer = np.empty(0, np.int32)
        self._source = 0  # where the last match ended, gone on from there
        self._table = np.zeros(_FIRST_SIZE, np.int32)  # the last places after MIN_MATCH tokens, by hash; 0: none

    def look(self, tokens: Ids) -> None:
        """Finds the match, and learns how the one before went on. tokens: all committed ones, more than the prompt."""
        base = known = len(self._tokens)
        if len(self._prediction):
            tokens = self._with_prediction(tokens)
        if len(tokens) == base:
            return
        if 2 * len(tokens) > len(self._table):
            self._table, known = np.zeros(2 << len(tokens).bit_length(), np.int32), 0
        agreed, source, match_len = _look(self._table, tokens, known, base, self._source)
        if self.match_len:
            self.rates.observe(self.match_len, agreed, missed=agreed < len(tokens) - base)
        self._tokens, self._source, self.match_len = tokens, source, match_len

    def following(self, first: int, count: int) -> Ids:
        """Tokens first..first+count-1 of what follows the match, int32: over and over, where it goes up to now."""
        begin = self._source + first
        if begin + count <= len(self._tokens):
            return self._tokens[begin : begin + count]
        return self._tokens[self._places(first, count)]

    def from_prediction(self, first: int, count: int) -> NDArray[np.bool_]:
        """bool [count]: which of these tokens stand in the prediction; empty where there is none."""
        if not len(self._prediction):
            return np.empty(0, np.bool_)
        places = self._places(first, count) - self._prompt_len
        return (places >= 0) & (places < len(self._prediction))

    def _places(self, first: int, count: int) -> NDArray[np.intp]:
        return self._source + np.arange(first, first + count) % (len(self._tokens) - self._source)

    def _with_prediction(self, tokens: Ids) -> Ids:
        count, first = len(self._prediction), self._prompt_len
        end, known = count + len(tokens), len(self._tokens) - count
        if end > len(self._buffer):
            self._buffer, known = np.empty(2 * end, np.int32), first
            self._buffer[:first], self._buffer[first : first + count] = tokens[:first], self._prediction
        self._buffer[count + known : end] = tokens[known:]
        return self._buffer[:end]


def warm_up() -> None:
    """Compiles, or loads, what looks matches up: in texts as they came in a message, and as they grow."""
    for tokens in (np.zeros(MIN_MATCH + 1, np.int32), np.frombuffer(bytes(4 * MIN_MATCH + 4), np.int32)):
        Text(CopyRates(), tokens[:0], 0).look(tokens)


@compiled
def _look(table: Table, tokens: Ids, known: int, base: int, source: int) -> tuple[int, int, int]:
    """Takes tokens from `known` on into the table, and finds the newest ones'.

    Text that was copied from one place, and edited here and there, goes on from there, though some of its tokens stood
    elsewhere later: the place that goes on from `source` counts unless another match is longer.

    Returns how many tokens from `base` on are those from `source` on; where the newest tokens' match ends; and its
    length, 0 for none.
    """
    end = len(tokens)
    agreed = 0
    while source and base + agreed < end and tokens[source + agreed] == tokens[base + agreed]:
        agreed += 1
    for at in range(max(known, MIN_MATCH), end):
        table[_slot(table, tokens, at)] = at
    if source:
        source += end - base
    length = _match_len(tokens, source)
    if end >= MIN_MATCH and length < _MOST_MATCH:
        newest = int(table[_slot(table, tokens, end)])
        found = _match_len(tokens, newest)
        if found > length:
            source, length = newest, found
    return agreed, source, length if length >= MIN_MATCH else 0


@compiled
def _match_len(tokens: Ids, place: int) -> int:
    """How many of the newest tokens stand before `place` too, as far as it counts."""
    end, length = len(tokens), 0
    while length < min(_MOST_MATCH, place) and tokens[place - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length


@compiled
def _slot(table: Table, tokens: Ids, at: int) -> int:
    """Where the tokens before `at` are, or belong: the first that is theirs, or nobody's, from their hash on."""
    mixed, mask = np.int64(0), len(table) - 1
    for token in tokens[at - MIN_MATCH : at]:
        mixed = (mixed ^ np.int64(token)) * np.int64(0x2545F4914F6CDD1D)
    slot = (mixed ^ (mixed >> 29)) & mask
    while table[slot]:
        place, same = table[slot], 0
        while same < MIN_MATCH and tokens[place - 1 - same] == tokens[at - 1 - same]:
            same += 1
        if same == MIN_MATCH:
            break
        slot = (slot + 1) & mask
    return int(slot)
