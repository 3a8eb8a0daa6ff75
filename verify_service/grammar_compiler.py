"""Grammars of requests, compiled by llguidance.

A schema comes from anyone, so its source is bounded, it is compiled off the event loop within the library's own limits,
on trial first where those do not hold (grammar_trial.py), and nothing that it names is ever fetched.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from outrider.errors import RETRY_SOON_S, InvalidArgument, ResourceExhausted, Unimplemented
from outrider.metrics import Buckets
from outrider.multiples import MOST_REMAINDERS, remainders_of, unescaped
from outrider.text_files import embedded
from outrider.thread_pool import thread_pool
from outrider.v1 import common_pb2
from outrider.wire import JSON_STYLE, MAX_GRAMMAR_BYTES
from verify_service import grammar_trial
from verify_service.grammar import GrammarState, led, refused
from verify_service.grammar_tokenizer import plain_tokenizer

MAX_CACHED = 64
MAX_TRIALS = 4  # under way, and queued: each may take a second
MAX_ANEW = 16  # sessions whose grammar is compiled once more, for a lexer of their own
_COMPILED_AT_ONCE = 2  # steps need the cores too
_ENDLESS = (
    "it takes too long to work out: too many patterns might have to hold at one place, or a number is too far below 0"
)
_ANY_OBJECT = '{"type": "object"}'


@dataclass(slots=True)
class GrammarTotals:
    """What became of requests' grammars; written under the compiler's lock."""

    compiled: int = 0
    cache_hits: int = 0
    refused: int = 0
    compile_s: Buckets = field(default_factory=Buckets)  # those that compiled, and those that did not


Source = tuple[str, str]
"""A grammar's kind, and its text."""

Compiled = LLMatcher | str
"""A grammar at its beginning, or why it is refused."""


@dataclass(eq=False, slots=True)
class _Asked:
    """A grammar that was asked for. Changed under the compiler's lock."""

    source: Source
    on_trial: bool
    known: Future[Compiled] = field(init=False)
    num_waiting: int = 0
    matcher: LLMatcher | None = None  # what came of it, where it is good


class GrammarCompiler:
    """Makes states from requests' grammars. Thread-safe; keeps those it used last, refused ones too.

    Who asks for one that is being compiled waits for that; others are compiled meanwhile, in threads of its own. What
    nobody waits for any more before it is begun is not compiled. on_thread: each of the threads begins with it.
    """

    def __init__(
        self, model_path: Path, *, vocab_size: int, eos_token_ids: tuple[int, ...],
        on_thread: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self._tokenizer_path = model_path / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._kept: OrderedDict[Source, _Asked] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = thread_pool(_COMPILED_AT_ONCE, "grammar", on_thread)
        self._trial_thread = thread_pool(1, "grammar-trial", on_thread)  # apart: others do not wait for trials
        self._num_anew = 0  # under way, and queued
        self.totals = GrammarTotals()

    async def settle(self, grammar: common_pb2.Grammar) -> Compiled:
        """What `compile` has to be given in order not to wait.

        InvalidArgument for what is no grammar, ResourceExhausted for one more that would have to be tried.
        """
        with self._wanted(_source_of(grammar), counts=True) as known:
            compiled = asyncio.wrap_future(known)
            compiled.add_done_callback(lambda done: done.cancelled() or done.exception())  # though nobody wait any more
            return await asyncio.shield(compiled)  # others want it though this request be cancelled

    def compile(self, grammar: common_pb2.Grammar, compiled: Compiled | None = None) -> GrammarState:
        """The state at the beginning of the output. InvalidArgument for a grammar that is refused, with the reason.

        compiled: what `settle` returned; without it this thread waits, and may be refused, as `settle` says.
        """
        kind, source = _source_of(grammar)
        if compiled is None:
            with self._wanted((kind, source)) as known:
                compiled = known.result()
        if isinstance(compiled, str):
            raise refused(kind, compiled)
        with self._lock:
            copy = compiled.deep_copy()
        anew = partial(self._anew, (kind, source), compiled)
        return GrammarState(copy, kind, self._vocab_size, end_ids=set(self._eos_token_ids), anew=anew)

    def close(self) -> None:
        """Compiles nothing more; waits for nothing."""
        for threads in (self._threads, self._trial_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _wanted(self, source: Source, *, counts: bool = False) -> Iterator[Future[Compiled]]:
        """A grammar once it is known, for who waits for that within. `counts`: one that is known already is a hit."""
        with self._lock:
            kept = self._kept.get(source)
            self.totals.cache_hits += counts and kept is not None and kept.known.done()
            asked = kept or self._begin(source)
            self._kept.move_to_end(source)
            asked.num_waiting += 1
        try:
            yield asked.known
        finally:
            with self._lock:
                asked.num_waiting -= 1
                if not asked.num_waiting and asked.known.cancel():
                    del self._kept[source]
                    asked.source = ("", "")  # the threads' queue may keep the rest for a while
                if len(self._kept) > MAX_CACHED:
                    self._forget_oldest()

    def _begin(self, source: Source) -> _Asked:
        """Has a grammar compiled."""
        asked = _Asked(source, on_trial=grammar_trial.is_needed(unescaped(source[1])))
        if asked.on_trial and self._num_trials() >= MAX_TRIALS:
            raise ResourceExhausted(
                f"{MAX_TRIALS} grammars that may take too long are being tried; try again later",
                retry_after_s=RETRY_SOON_S,
            )
        asked.known = (self._trial_thread if asked.on_trial else self._threads).submit(self._compile, asked)
        self._kept[source] = asked
        return asked

    def _num_trials(self) -> int:
        return sum(asked.on_trial and not asked.known.done() for asked in self._kept.values())

    def _forget_oldest(self) -> None:
        done = [source for source, asked in self._kept.items() if asked.known.done()]  # others are still to be shared
        for oldest in done[:-MAX_CACHED]:
            del self._kept[oldest]

    def _compile(self, asked: _Asked) -> Compiled:
        began = time.monotonic()
        try:
            ended = not asked.on_trial or self._ends(*asked.source)
            compiled = self._matcher_of(*asked.source) if ended else _ENDLESS
        except BaseException:  # of this server, not of the grammar: nothing to remember
            with self._lock:
                del self._kept[asked.source]
            raise
        with self._lock:
            self.totals.compile_s.observe(time.monotonic() - began)
            if isinstance(compiled, str):
                self.totals.refused += 1
            else:
                self.totals.compiled += 1
                asked.matcher = compiled
        return compiled

    def _ends(self, kind: str, source: str) -> bool:
        self._load_tokenizer()  # where there is none it says so
        try:
            grammar = _lark_of(kind, source)
        except (ValueError, RecursionError):  # which compiling it says in words
            return True
        return grammar_trial.ends(grammar, self._tokenizer_path, self._vocab_size)

    def _anew(self, source: Source, spent: LLMatcher, output: Sequence[int]) -> Future[LLMatcher] | None:
        """GrammarState's `anew`; who asks for the grammar from now on gets no copy of `spent` any more."""
        with self._lock:
            kept = self._kept.get(source)
            if kept is not None and kept.matcher is spent:
                del self._kept[source]
            if self._num_anew >= MAX_ANEW:
                return None
            self._num_anew += 1
        on_trial = grammar_trial.is_needed(unescaped(source[1]))  # it was tried, and may take long all the same
        try:
            return (self._trial_thread if on_trial else self._threads).submit(self._led_anew, source, output)
        except RuntimeError:  # closed
            return None

    def _led_anew(self, source: Source, output: Sequence[int]) -> LLMatcher:
        try:
            return led(LLMatcher(self._load_tokenizer(), _lark_of(*source), log_level=0), output)
        finally:
            with self._lock:
                self._num_anew -= 1

    def _matcher_of(self, kind: str, source: str) -> Compiled:
        if remainders_of(source) > MOST_REMAINDERS:  # llguidance would take minutes, and its limits do not hold there
            return f"its values of multipleOf have more than {MOST_REMAINDERS} for a common multiple"
        try:
            matcher = LLMatcher(self._load_tokenizer(), _lark_of(kind, source), log_level=0)
        except RecursionError:
            return "it is nested too deeply"
        except ValueError as error:
            return str(error)
        if matcher.is_error():
            return matcher.get_error()
        return matcher if any(matcher.compute_bitmask()) and not matcher.is_error() else "nothing satisfies it"

    def _load_tokenizer(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                if not self._tokenizer_path.is_file():
                    raise Unimplemented(
                        "structured output needs a model folder with tokenizer.json", field="sampling.grammar"
                    )
                try:
                    source = embedded(self._tokenizer_path.read_text(encoding="utf-8"), self._vocab_size)
                    self._tokenizer = plain_tokenizer(source, self._vocab_size, self._eos_token_ids)
                except ValueError as error:  # no fault of the grammar
                    reason = f"structured output cannot be had with this model's tokenizer.json: {error}"
                    raise Unimplemented(reason, field="sampling.grammar") from error
            return self._tokenizer


def _source_of(grammar: common_pb2.Grammar) -> Source:
    """InvalidArgument for what is no grammar, or too long a one."""
    kind = grammar.WhichOneof("kind")
    if kind is None:
        raise InvalidArgument("sampling.grammar has no kind", field="sampling.grammar")
    if kind == "json_object" and not grammar.json_object:
        raise InvalidArgument("sampling.grammar.json_object is false: leave it out", field="sampling.grammar")
    source = _ANY_OBJECT if kind == "json_object" else getattr(grammar, kind)
    if len(source.encode()) > MAX_GRAMMAR_BYTES:
        raise refused(kind, f"it has {len(source.encode())} bytes; at most {MAX_GRAMMAR_BYTES} are taken")
    return kind, source


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
