"""Structured output: what a grammar allows after each path, by llguidance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from outrider.errors import InvalidArgument
from outrider.tree import ROOT, TokenTree

_OF_THE_LEXER = "lexer error"  # how llguidance begins to tell of such
_NOTHING = np.zeros(0, np.uint8)

Anew = Callable[[Sequence[int]], Future[LLMatcher] | None]
"""Has a matcher with a lexer of its own made and led through an output, as plain decoding would; None: not now."""


class GrammarState:
    """Where one session stands in its grammar; follows committed tokens and looks ahead along tree paths.

    A matcher that was led past its grammar's end stays in error for good, and a draft may do that: looking ahead is for
    a copy. It follows what is committed too, since making one takes the longer, the longer the output is.

    All copies of a matcher share its lexer, those of other sessions too, and where one runs into a limit of the lexer,
    all are in error: spent. Then a matcher that `anew` has made says whether the output can go on; nothing looks ahead
    from there on, so this is done once at most.
    """

    def __init__(
        self, matcher: LLMatcher, kind: str, vocab_size: int, *, end_ids: AbstractSet[int], anew: Anew
    ) -> None:  # fmt: skip
        self._matcher = matcher
        self._kind = kind
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._anew: Anew | None = anew
        self._output: list[int] = []
        self._masks: dict[tuple[int, ...], NDArray[np.uint8]] = {}  # of this step, which stay though it be spent in it
        self._ahead: LLMatcher | None = None
        self._path: list[int] = []  # tokens that it consumed beyond the committed ones

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow what is committed."""
        return self._matcher.is_stopped()

    @property
    def looks_ahead(self) -> bool:
        """Whether drafts may be looked at."""
        return self._anew is not None

    @property
    def is_spent(self) -> bool:
        """Whether its lexer's error may be another's: `renew` is to be called before anything else is asked."""
        return self._anew is not None and self._matcher.get_error().startswith(_OF_THE_LEXER)

    def renew(self) -> Future[LLMatcher] | None:
        """What `take` is to be given before the session goes on. None: there is no room for one more that waits."""
        assert self._anew is not None
        anew, self._anew = self._anew, None
        return anew(self._output)

    def take(self, matcher: LLMatcher) -> None:
        """Goes on with what `renew` promised."""
        self._matcher, self._ahead, self._path = matcher, None, []
        self._masks.clear()

    def dead_end(self) -> InvalidArgument | None:
        """What to tell the client when what is committed cannot go on, nor end, as the grammar says."""
        if not self._matcher.is_error():
            return None
        reason = self._matcher.get_error().partition("\n")[0] or "nothing can follow, nor the output end"
        return refused(self._kind, f"it leads to where it cannot go on: {reason}")

    def leaves_only(self, tokens: AbstractSet[int]) -> InvalidArgument | None:
        """What to tell the client when none but these, which the request forbids here, may follow what is committed."""
        if not tokens >= set(np.flatnonzero(self._allowed([])).tolist()):
            return None
        return refused(self._kind, "it leads to where only tokens can follow that min_tokens forbids")

    def commit(self, token: int) -> bool:
        """Takes in a committed token; False, and it is not, when the grammar forbids it or ends dead there."""
        if self._ahead is not None and self._path[:1] != [token]:
            self._lead([token])
        self._path = self._path[1:]
        self._masks.clear()
        if not self._matcher.consume_token(token):
            return False
        self._output.append(token)
        return True

    def forbid(self, row: NDArray[np.float32], path: list[int]) -> None:
        """Sets the logits float32 [V] of tokens that may not follow `path` to -inf, in place."""
        allowed = self._allowed(path)
        row[: len(allowed)][allowed == 0] = -math.inf
        row[len(allowed) :] = -math.inf

    def mask_words(self, path: list[int]) -> NDArray[np.int32]:
        """int32 [ceil(V / 32)]: bit t % 32 of word t // 32 is set when token t may follow `path`."""
        words = np.zeros(-(-self._vocab_size // 32), np.int32)
        bits = self._mask(path)[: words.nbytes]
        words.view(np.uint8)[: len(bits)] = bits
        return words

    def allowed_nodes(self, tree: TokenTree) -> NDArray[np.int32]:
        """Indices int32, ascending, of the nodes whose whole path the grammar allows."""
        allowed = np.zeros(len(tree), np.bool_)
        has_children = set(tree.parents.tolist())
        for leaf in range(len(tree) if self.looks_ahead else 0):
            if leaf not in has_children:
                path = tree.path(leaf)
                allowed[path[: self._matcher.validate_tokens(tree.tokens[path].tolist())]] = True
        return np.flatnonzero(allowed).astype(np.int32)

    def _allowed(self, path: list[int]) -> NDArray[np.uint8]:
        """uint8, one a token, at most V of them: 1 where the token may follow `path`."""
        return np.unpackbits(self._mask(path), bitorder="little")[: self._vocab_size]

    def _mask(self, path: list[int]) -> NDArray[np.uint8]:
        """Bits of the tokens that may follow `path`; empty where that is an error, of which plain decoding tells."""
        known = self._masks.get(tuple(path))
        if known is None:
            known = self._masks[tuple(path)] = self._mask_ahead(path) if path else _bits(self._matcher)
        return known

    def _mask_ahead(self, path: list[int]) -> NDArray[np.uint8]:
        """The same beyond what is committed."""
        if not self.looks_ahead:
            return _NOTHING
        ahead = self._lead(path)
        bits = _bits(ahead)
        forced = _only(bits)
        if forced is not None and forced not in self._end_ids and not ahead.is_stopped():
            # One token is forced, so it looked at all that is forced behind; what was wrong there is said only now.
            ahead.consume_token(forced)
            self._path.append(forced)
        return _NOTHING if ahead.is_error() else bits

    def _lead(self, path: list[int]) -> LLMatcher:
        """A matcher that has consumed `path` beyond what is committed, up to where the output ends."""
        if self._ahead is None or self._ahead.is_error():
            self._ahead, self._path = self._matcher.deep_copy(), []
        shared = 0
        while shared < min(len(path), len(self._path)) and path[shared] == self._path[shared]:
            shared += 1
        if len(self._path) > shared:
            self._ahead.rollback(len(self._path) - shared)
            del self._path[shared:]
        for token in path[shared:]:
            if self._ahead.is_stopped():
                break
            self._ahead.consume_token(token)
            self._path.append(token)
        return self._ahead


def led(matcher: LLMatcher, output: Sequence[int]) -> LLMatcher:
    """The matcher behind an output, as plain decoding leads it."""
    matcher.compute_bitmask()  # the lexer's limits are for what it does from one of these to the next
    for token in output:
        matcher.consume_token(token)
        matcher.compute_bitmask()
    return matcher


def _bits(matcher: LLMatcher) -> NDArray[np.uint8]:
    """A bit for each token that may follow; empty where that is an error."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return _NOTHING if matcher.is_error() else bits


def _only(bits: NDArray[np.uint8]) -> int | None:
    """The token whose bit alone is set."""
    if np.count_nonzero(bits) != 1:
        return None
    place = int(bits.argmax())
    byte = int(bits[place])
    return None if byte & (byte - 1) else 8 * place + byte.bit_length() - 1


def pruned(tree: TokenTree, grammar: GrammarState) -> tuple[TokenTree, NDArray[np.int32]]:
    """The tree without nodes that the grammar forbids, and the indices of what is left."""
    nodes = grammar.allowed_nodes(tree)
    return (tree, nodes) if len(nodes) == len(tree) else tree.selected(ROOT, nodes.tolist())


def refused(kind: str, reason: str) -> InvalidArgument:
    """What to tell the client of a grammar that cannot be followed."""
    code = "invalid_json_schema" if kind.startswith("json") else "invalid_grammar"
    return InvalidArgument(f"sampling.grammar.{kind}: {reason[:512]}", field="sampling.grammar", code=code)
