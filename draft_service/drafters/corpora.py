"""Corpora of an n-gram drafter: texts that files and programs gave it, by scope and id, within limits."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, replace

from draft_service.drafters.corpus import Corpus, Name
from outrider.errors import NotFound, ResourceExhausted
from outrider.wire import Ids

MAX_PER_SCOPE = 12  # a lookup reads those of a scope and those for everyone, of at most trie.MAX_ROOTS_PER_MATCH names
MAX_CORPORA = 1024


@dataclass(slots=True)
class CorpusSize:
    """One corpus, and the tokens that it holds or that wait to be taken in."""

    scope: str  # empty: for everyone
    corpus_id: str
    num_tokens: int


class Corpora:
    """Which there are. One thread at a time may change them."""

    def __init__(self, corpus: Corpus, max_tokens: int) -> None:
        self.corpus = corpus
        self._max_tokens = max_tokens
        self._sizes: dict[tuple[str, str], CorpusSize] = {}  # by scope and id
        self._names: dict[str, list[Name]] = {}  # by scope; lists are replaced, never changed

    def names(self, scope: str) -> list[Name]:
        """Corpora that a request of this scope draws from: its scope's, and those for everyone."""
        scoped = self._names.get(scope, []) if scope else []
        return [*scoped, *self._names.get("", [])]

    def sizes(self) -> list[CorpusSize]:
        """Every corpus, oldest first."""
        return [replace(size) for size in self._sizes.values()]

    def load(self, scope: str, corpus_id: str, tokens: Ids) -> Future[None]:
        """Queues a text of a corpus, new or known. ResourceExhausted over a limit of tokens, corpora, trie or queue."""
        self._check_room(scope, corpus_id, len(tokens))
        loaded = self.corpus.load(_name(scope, corpus_id), tokens)  # refuses before anything is noted
        size = self._sizes.setdefault((scope, corpus_id), CorpusSize(scope, corpus_id, 0))
        size.num_tokens += len(tokens)
        self._list(scope)
        return loaded

    def unload(self, scope: str, corpus_id: str) -> tuple[int, Future[None]]:
        """Queues a corpus's end; the tokens that it had. NotFound where there is none."""
        size = self._sizes.pop((scope, corpus_id), None)
        if size is None:
            place = f"scope {scope!r}" if scope else "the scope of everyone"
            raise NotFound(f"there is no corpus {corpus_id!r} in {place}", field="corpus_id")
        self._list(scope)
        return size.num_tokens, self.corpus.unload(_name(scope, corpus_id))

    def _check_room(self, scope: str, corpus_id: str, num_tokens: int) -> None:
        held = sum(size.num_tokens for size in self._sizes.values())
        if held + num_tokens > self._max_tokens:
            raise ResourceExhausted(
                f"{held} corpus tokens are held and {num_tokens} more are to come; at most {self._max_tokens} are "
                "taken (--speculative-ngram-external-corpus-max-tokens)",
                field="tokens",
            )
        if (scope, corpus_id) in self._sizes:
            return
        for count, most, where in (
            (len(self._names.get(scope, [])), MAX_PER_SCOPE, "its scope has"),
            (len(self._sizes), MAX_CORPORA, "there are"),
        ):
            if count >= most:
                raise ResourceExhausted(
                    f"corpus_id {corpus_id!r} is new, and {where} {count} corpora; at most {most} are kept",
                    field="corpus_id",
                )

    def _list(self, scope: str) -> None:
        self._names[scope] = [_name(*key) for key in self._sizes if key[0] == scope]
        if not self._names[scope]:
            del self._names[scope]


def _name(scope: str, corpus_id: str) -> Name:
    return ("corpus", scope, corpus_id)
