"""Structured output: what a grammar allows after each path, by llguidance.

A schema comes from anyone, so its source is bounded, it is compiled off the event loop within the library's own limits,
on trial first where those do not hold (grammar_trial.py), and nothing that it names is ever fetched.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from outrider.errors import InvalidArgument, ResourceExhausted, Unimplemented
from outrider.metrics import Buckets
from outrider.multiples import MOST_REMAINDERS, remainders_of, unescaped
from outrider.tree import ROOT, TokenTree
from outrider.v1 import common_pb2
from outrider.wire import JSON_STYLE, MAX_GRAMMAR_BYTES
from verify_service import grammar_trial

_MAX_CACHED = 64
MAX_TRIALS = 4  # one that runs, and those that wait for it: each may take seconds, and keeps a thread
_ANY_OBJECT = '{"type": "object"}'


class GrammarState:
    """Where one session stands in its grammar; follows committed tokens and looks ahead along tree paths.

    A matcher that was led past its grammar's end stays in error for good, and a draft may do that: looking ahead is for
    a copy.
    """

    def __init__(self, matcher: LLMatcher, kind: str, vocab_size: int) -> None:
        self._matcher = matcher
        self._kind = kind
        self._vocab_size = vocab_size
        self._ahead: LLMatcher | None = None
        self._path: list[int] = []  # tokens that it consumed beyond the committed ones

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow what is committed."""
        return self._matcher.is_stopped()

    def dead_end(self) -> InvalidArgument | None:
        """What to tell the client when what is committed cannot go on, nor end, as the grammar says."""
        if not self._matcher.is_error():
            return None
        reason = self._matcher.get_error().partition("\n")[0] or "nothing can follow, nor the output end"
        return _refused(self._kind, f"it leads to where it cannot go on: {reason}")

    def leaves_only(self, tokens: AbstractSet[int]) -> InvalidArgument | None:
        """What to tell the client when none but these, which the request forbids here, may follow what is committed."""
        if not tokens >= set(np.flatnonzero(self._allowed([])).tolist()):
            return None
        return _refused(self._kind, "it leads to where only tokens can follow that min_tokens forbids")

    def commit(self, token: int) -> bool:
        """Takes in a committed token; False when the grammar forbids it."""
        self._ahead = None
        return self._matcher.consume_token(token)

    def forbid(self, row: NDArray[np.float32], path: list[int]) -> None:
        """Sets the logits float32 [V] of tokens that may not follow `path` to -inf, in place."""
        allowed = self._allowed(path)
        row[: len(allowed)][allowed == 0] = -math.inf
        row[len(allowed) :] = -math.inf

    def mask_words(self, path: list[int]) -> NDArray[np.int32]:
        """int32 [ceil(V / 32)]: bit t % 32 of word t // 32 is set when token t may follow `path`."""
        words = np.zeros(-(-self._vocab_size // 32), np.int32)
        bits = np.frombuffer(self._at(path).compute_bitmask(), np.uint8)[: words.nbytes]
        words.view(np.uint8)[: len(bits)] = bits
        return words

    def allowed_nodes(self, tree: TokenTree) -> NDArray[np.int32]:
        """Indices, ascending, of the nodes whose whole path the grammar allows."""
        allowed = np.zeros(len(tree), np.bool_)
        has_children = set(tree.parents.tolist())
        for leaf in range(len(tree)):
            if leaf not in has_children:
                path = tree.path(leaf)
                allowed[path[: self._matcher.validate_tokens(tree.tokens[path].tolist())]] = True
        return np.flatnonzero(allowed).astype(np.int32)

    def _allowed(self, path: list[int]) -> NDArray[np.uint8]:
        """By token, at most V of them: 1 where it may follow `path`."""
        bits = np.frombuffer(self._at(path).compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size]

    def _at(self, path: list[int]) -> LLMatcher:
        """A matcher that has consumed `path` beyond what is committed."""
        if not path:
            return self._matcher
        if self._ahead is None or self._ahead.is_error():
            self._ahead, self._path = self._matcher.deep_copy(), []
        shared = 0
        while shared < min(len(path), len(self._path)) and path[shared] == self._path[shared]:
            shared += 1
        if len(self._path) > shared:
            self._ahead.rollback(len(self._path) - shared)
        self._ahead.consume_tokens(path[shared:])
        self._path = list(path)
        return self._ahead


@dataclass(slots=True)
class GrammarTotals:
    """What became of requests' grammars; written under the compiler's lock."""

    compiled: int = 0
    cache_hits: int = 0
    refused: int = 0
    compile_s: Buckets = field(default_factory=Buckets)  # those that compiled, and those that did not


class GrammarCompiler:
    """Makes states from requests' grammars. Thread-safe; keeps the compiled ones it used last."""

    def __init__(self, model_path: Path, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer_path = model_path / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._room_for_trials = threading.Semaphore(MAX_TRIALS)
        self._trial = threading.Lock()
        self._endless: deque[tuple[str, str]] = deque(maxlen=_MAX_CACHED)  # those whose trial came to no end
        self.totals = GrammarTotals()

    def compile(self, grammar: common_pb2.Grammar) -> GrammarState:
        """The state at the beginning of the output. InvalidArgument for a grammar that is refused, with the reason."""
        kind = grammar.WhichOneof("kind")
        if kind is None:
            raise InvalidArgument("sampling.grammar has no kind", field="sampling.grammar")
        if kind == "json_object" and not grammar.json_object:
            raise InvalidArgument("sampling.grammar.json_object is false: leave it out", field="sampling.grammar")
        source = _ANY_OBJECT if kind == "json_object" else getattr(grammar, kind)
        if len(source.encode()) > MAX_GRAMMAR_BYTES:
            raise _refused(kind, f"it has {len(source.encode())} bytes; at most {MAX_GRAMMAR_BYTES} are taken")
        if (kind, source) not in self._compiled and grammar_trial.is_needed(unescaped(source)):
            self._try(kind, source)
        with self._lock:
            matcher = self._compiled.get((kind, source))
            if matcher is None:
                matcher = self._count(kind, source)
            else:
                self.totals.cache_hits += 1
            self._compiled[kind, source] = matcher
            self._compiled.move_to_end((kind, source))
            if len(self._compiled) > _MAX_CACHED:
                self._compiled.popitem(last=False)
            return GrammarState(matcher.deep_copy(), kind, self._vocab_size)

    def _try(self, kind: str, source: str) -> None:
        """InvalidArgument for a grammar that takes too long to compile; others are compiled meanwhile."""
        if not self._room_for_trials.acquire(blocking=False):
            raise ResourceExhausted(f"{MAX_TRIALS} grammars with many patterns are being tried; try again later")
        try:
            with self._trial:
                is_endless = (kind, source) in self._endless
                if not is_endless and (kind, source) not in self._compiled:
                    is_endless = not grammar_trial.ends(_lark_of(kind, source))
                if is_endless:
                    self._endless.append((kind, source))
        except (ValueError, RecursionError):  # which compiling it will say in words
            return
        finally:
            self._room_for_trials.release()
        if is_endless:
            with self._lock:
                self.totals.refused += 1
            raise _refused(kind, "it takes too long to work out: too many patterns might have to hold at one place")

    def _count(self, kind: str, source: str) -> LLMatcher:
        began = time.monotonic()
        try:
            matcher = self._compile(kind, source)
        except InvalidArgument:
            self.totals.refused += 1
            raise
        finally:
            self.totals.compile_s.observe(time.monotonic() - began)
        self.totals.compiled += 1
        return matcher

    def _compile(self, kind: str, source: str) -> LLMatcher:
        if remainders_of(source) > MOST_REMAINDERS:  # llguidance would take minutes, and its limits do not hold there
            raise _refused(kind, f"its values of multipleOf have more than {MOST_REMAINDERS} for a common multiple")
        try:
            matcher = LLMatcher(self._load_tokenizer(), _lark_of(kind, source), log_level=0)
        except RecursionError:
            raise _refused(kind, "it is nested too deeply") from None
        except ValueError as error:
            raise _refused(kind, str(error)) from error
        if matcher.is_error():
            raise _refused(kind, matcher.get_error())
        if not any(matcher.compute_bitmask()) or matcher.is_error():
            raise _refused(kind, "nothing satisfies it")
        return matcher

    def _load_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            if not self._tokenizer_path.is_file():
                raise Unimplemented("structured output needs a model folder with tokenizer.json", field="grammar")
            source = self._tokenizer_path.read_text(encoding="utf-8")
            self._tokenizer = _plain(source, self._vocab_size, self._eos_token_ids)
        return self._tokenizer


class _PlainTokenizer:
    """Tokenises text in which the names of control tokens are text; the library's own makes control tokens of them."""

    def __init__(self, base: LLTokenizer, added: list[dict[str, Any]], eos_token_ids: list[int]) -> None:
        self.bos_token_id = None
        self.eos_token_id = base.eos_token
        self.tokens = [base.decode_bytes([token]) for token in range(base.vocab_size)]
        # The library holds whatever was added in angle brackets for a control token; many models think in such.
        text = {token["id"] for token in added if not token.get("special")}.difference(eos_token_ids)
        self.special_token_ids = [t for t in range(base.vocab_size) if base.is_special_token(t) and t not in text]
        self._base = base
        longest_first = sorted((token["content"] for token in added if token.get("special")), key=len, reverse=True)
        names = b"|".join(re.escape(name.encode()) for name in longest_first)
        self._controls = re.compile(b"(" + (names or b"(?!)") + b")")

    def __call__(self, text: bytes) -> list[int]:
        """Token ids; every second piece is such a name, made of ordinary tokens."""
        tokens: list[int] = []
        for place, piece in enumerate(self._controls.split(text)):
            tokens += self._base.greedy_tokenize(piece.decode()) if place % 2 else self._base.tokenize_bytes(piece)
        return tokens


def _plain(source: str, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    """The tokenizer of a tokenizer.json, so that a control token stands only where the output ends."""
    eos = eos_token_ids or None
    base = LLTokenizer(source, n_vocab=vocab_size, eos_token=eos)
    added = json.loads(source).get("added_tokens") or []
    if not added:
        return base
    plain = _PlainTokenizer(base, added, eos_token_ids)
    return LLTokenizer(TokenizerWrapper(plain), n_vocab=vocab_size, eos_token=eos)


def pruned(tree: TokenTree, grammar: GrammarState) -> tuple[TokenTree, NDArray[np.int32]]:
    """The tree without nodes that the grammar forbids, and the indices of what is left."""
    nodes = grammar.allowed_nodes(tree)
    return (tree, nodes) if len(nodes) == len(tree) else tree.selected(ROOT, nodes.tolist())


def _lark_of(kind: str, source: str) -> str:
    if kind in ("json_object", "json_schema"):
        schema = json.loads(source)
        if not isinstance(schema, dict | bool):
            raise ValueError("a schema must be an object or a boolean")
        if schema is False:
            raise ValueError("nothing satisfies it")
        source = "{}" if schema is True else source
        return LLMatcher.grammar_from_json_schema(source, defaults=JSON_STYLE)  # type: ignore[arg-type]
    if kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(source))
    except RecursionError:
        raise
    except Exception as error:  # the library's converter raises nothing more specific
        raise ValueError(str(error)) from error


def _refused(kind: str, reason: str) -> InvalidArgument:
    code = "invalid_json_schema" if kind.startswith("json") else "invalid_grammar"
    return InvalidArgument(f"sampling.grammar.{kind}: {reason[:512]}", field="sampling.grammar", code=code)
