"""The n-gram drafter: proposes what followed the newest tokens before, in this text, in others', or in a corpus.

What a session may draw from, in this order for matches of equal length: its request's prediction; its own text and
that of the sessions it shares a trie with (all without a scope, all with the same scope, or none, by `scope`); the
corpora of its scope; the corpora for everyone. Texts of different vocabularies never meet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Self

import numpy as np

from draft_service.drafters.base import AheadRequest, Draft, DraftRequest, GivenUp, TextRequest
from draft_service.drafters.corpora import Corpora
from draft_service.drafters.corpus import Corpus, Name
from draft_service.drafters.outcomes import likely_ends, likely_outcomes
from draft_service.drafters.trie import MatchRules, NgramTrie, OwnTexts, plain
from draft_service.session import Extension, Session, Wishes
from outrider.args import DraftArgs
from outrider.errors import ResourceExhausted, StartupError
from outrider.v1 import common_pb2
from outrider.wire import Ids

DEFAULT_NUM_DRAFT_TOKENS = 12
FILES = "files"  # the corpus, for everyone, that --speculative-ngram-external-corpus-path makes
_PIECE = 4096  # tokens of a file, or of a call's own text, that are taken at a time


class NgramDrafter:
    """Implements base.Drafter with a trie; see SGLang's NGRAM for the flags."""

    algorithm = common_pb2.ALGORITHM_NGRAM
    draft_model = ""
    inline = True

    def __init__(
        self,
        corpus: Corpus,
        rules: MatchRules,
        *,
        num_draft_tokens: int = DEFAULT_NUM_DRAFT_TOKENS,
        scope: Literal["global", "session"] = "global",
        max_corpus_tokens: int = 10_000_000,
    ) -> None:
        self.corpus = corpus
        self.corpora = Corpora(corpus, max_corpus_tokens)
        self.num_draft_tokens = num_draft_tokens
        self.features = common_pb2.FeatureLayout(kind=common_pb2.FEATURE_KIND_NONE)
        self.target = common_pb2.ModelInfo()
        self._rules = rules
        self._scope = scope

    @classmethod
    def from_args(cls, args: DraftArgs) -> Self:
        """Makes a drafter whose corpus holds the files that are named already. StartupError for a file that is bad."""
        rules = MatchRules(
            min_match=args.speculative_ngram_min_match_window_size,
            max_match=args.speculative_ngram_max_match_window_size,
            min_breadth=args.speculative_ngram_min_bfs_breadth,
            max_breadth=args.speculative_ngram_max_bfs_breadth,
            match_type=args.speculative_ngram_match_type,
        )
        capacity, branch_length = args.speculative_ngram_capacity, args.speculative_ngram_branch_length
        trie = NgramTrie(
            capacity,
            branch_length=branch_length,
            min_match=rules.min_match,
            max_kept=min(capacity // 2, capacity - branch_length - 1),
        )
        drafter = cls(
            Corpus(trie, max_pending_tokens=args.max_pending_tokens),
            rules,
            num_draft_tokens=args.speculative_num_draft_tokens or DEFAULT_NUM_DRAFT_TOKENS,
            scope=args.speculative_ngram_scope,
            max_corpus_tokens=args.speculative_ngram_external_corpus_max_tokens,
        )
        if args.speculative_ngram_external_corpus_path:
            drafter._load_files(args)
        return drafter

    def _load_files(self, args: DraftArgs) -> None:
        from draft_service.corpus_files import read_corpora
        from engine.model_folder import resolve_model

        folder = resolve_model(args.model_path, revision=args.revision)
        try:
            for tokens in read_corpora(args.speculative_ngram_external_corpus_path, folder):
                # In pieces: of each that is in it is known what room it took, which is mostly less than it might.
                for first in range(0, len(tokens), _PIECE):
                    self.corpora.load("", FILES, tokens[first : first + _PIECE]).result()
        except (StartupError, ResourceExhausted) as error:
            self.close_down()
            raise StartupError(str(error)) from error

    def warm_up(self) -> None:
        """Compiles, or loads from the cache, every loop that a request would run."""
        name: Name = ("warm-up",)
        text = np.arange(512, dtype=np.int32)
        self.corpus.insert(name, text)
        self.corpus.flush()
        for match_type in ("BFS", "PROB"):
            self._match([name], text[:8], replace(self._rules, match_type=match_type), 8, 8, 512)
        self.corpus.drop(name).result()

    def open(self, sessions: Sequence[Session]) -> None:
        """Queues their texts; of a prompt that another session here has, only what follows it."""
        for session in sessions:
            known = session.prompt_len if session.shares_prefix and self._scope == "global" else 0
            self._insert(session, known)
            if len(session.prediction):
                self.corpus.insert(_prediction(session), session.prediction)

    def add_features(self, rows: Sequence[tuple[Session, common_pb2.FeatureRows]]) -> None:
        """Needs none; a verify service that sends them all the same is not at fault."""

    def extend(self, extensions: Sequence[Extension]) -> None:
        """Queues what was committed."""
        for extension in extensions:
            self._insert(extension.session, extension.base_len)

    def close(self, sessions: Sequence[Session]) -> None:
        """Drops what only these sessions could draw from."""
        for session in sessions:
            if self._scope == "session":
                self.corpus.drop(self._own(session))
            if len(session.prediction):
                self.corpus.drop(_prediction(session))

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Drafts what followed the newest tokens before."""
        return [
            self._draft(request.session, request.session.tokens, request.num_nodes, request.session.max_depth())
            for request in requests
        ]

    def draft_ahead(self, requests: Sequence[AheadRequest]) -> list[list[Draft]]:
        """Below likely accepted paths, each with the likeliest token that the tree does not offer there."""
        return [self._ahead(request) for request in requests]

    def num_nodes(self, wishes: Wishes) -> int:
        """Nodes of a request's trees: as the flag says, where the request does not."""
        return (wishes.num_draft_tokens or self.num_draft_tokens) - 1

    def is_brief(self, sessions: Sequence[Session]) -> bool:
        """Always."""
        return True

    def take_given_up(self) -> list[GivenUp]:
        """None: there is nothing that a session could run out of."""
        return []

    async def propose(self, request: TextRequest) -> Draft:
        """Reads the text and prediction of the request, the global or scoped trie and the corpora; leaves no trace."""
        own = await self._own_texts([request.prediction, request.tokens])
        return self._matched(
            self._shared(request.vocabulary, request.corpus_scope), request.tokens, request.wishes,
            self.num_nodes(request.wishes), request.wishes.num_steps or self.corpus.branch_length, request.vocab_size,
            own=own,
        )  # fmt: skip

    async def _own_texts(self, texts: Sequence[Ids]) -> OwnTexts:
        """Texts apart from all others, inserted piece by piece on threads: of one that is cancelled no more is done."""
        trie = NgramTrie(
            self.corpus.capacity + len(texts),
            branch_length=self.corpus.branch_length,
            min_match=self._rules.min_match,
        )
        roots = np.array([trie.new_root() for _ in texts], np.int32)
        for root, text in zip(roots.tolist(), map(plain, texts), strict=True):
            start = 0
            while start < len(text):
                stop = min(start + _PIECE, len(text))
                start = await asyncio.to_thread(trie.insert_some, root, text, start, stop)
                if start < stop:
                    trie.adopt(await asyncio.to_thread(trie.grown))
        return OwnTexts(trie, roots)

    def close_down(self) -> None:
        """Ends the inserting thread."""
        self.corpus.close()

    def _insert(self, session: Session, known: int) -> None:
        first = max(0, known - self.corpus.branch_length + 1)
        self.corpus.insert(self._own(session), session.tokens[first:], known - first)

    def _own(self, session: Session) -> Name:
        if self._scope == "session":
            return ("session", str(session.uid))
        return ("text", session.vocabulary, session.corpus_scope)

    def _shared(self, vocabulary: str, scope: str) -> list[Name]:
        """Corpora, and where sessions share one trie, their texts."""
        texts: list[Name] = [("text", vocabulary, scope)] if self._scope == "global" else []
        return texts + self.corpora.names(scope)

    def _draft(self, session: Session, context: Ids, num_nodes: int, max_depth: int) -> Draft:
        names = [_prediction(session)] if len(session.prediction) else []
        if self._scope == "session":
            names.append(self._own(session))
        names += self._shared(session.vocabulary, session.corpus_scope)
        return self._matched(
            names, context, session.wishes, num_nodes, max_depth, session.vocab_size, predicted=_prediction(session)
        )

    def _matched(
        self, names: list[Name], context: Ids, wishes: Wishes, num_nodes: int, max_depth: int, vocab_size: int, *,
        predicted: Name = (), own: OwnTexts | None = None,
    ) -> Draft:  # fmt: skip
        rules = self._rules
        if wishes.topk is not None:
            rules = replace(rules, max_breadth=wishes.topk, min_breadth=min(wishes.topk, rules.min_breadth))
        return self._match(names, context, rules, num_nodes, max_depth, vocab_size, predicted, own)

    def _match(
        self, names: list[Name], context: Ids, rules: MatchRules, num_nodes: int, max_depth: int, vocab_size: int,
        predicted: Name = (), own: OwnTexts | None = None,
    ) -> Draft:  # fmt: skip
        """predicted: the name of the request's prediction, the first of all; of `own` texts the first is it."""
        match, known = self.corpus.match(
            names, context[-rules.max_match :], rules, num_nodes=max(0, num_nodes),
            max_depth=min(max_depth, self.corpus.branch_length), vocab_size=vocab_size, own=own,
        )  # fmt: skip
        bit = int(own is not None or known[:1] == [predicted])
        return Draft(match.tokens, match.parents, match.probabilities, (match.sources & bit) != 0)

    def _ahead(self, request: AheadRequest) -> list[Draft]:
        session, tree = request.verifying.session, request.verifying.tree
        ends = likely_ends(tree, request.verifying.probabilities, request.max_assumed - 1)
        paths = [tree.tokens[tree.path(node)] for node, _ in ends]
        guesses: list[list[tuple[int, float]]] = []
        for (node, _), path in zip(ends, paths, strict=True):
            offered = {int(tree.tokens[child]) for child in tree.children(node)}
            accepted = np.concatenate([session.tokens[-self._rules.max_match :], path])
            named = self._draft(session, accepted, len(offered) + request.max_outcomes, 1)
            tokens = zip(named.tokens.tolist(), named.probabilities.tolist(), strict=True)
            guesses.append([(token, chance) for token, chance in tokens if token not in offered])
        drafts: list[Draft] = []
        for at, bonus in likely_outcomes([chance for _, chance in ends], guesses, len(ends) * request.max_outcomes):
            assumed = np.array([*paths[at], bonus], np.int32)
            context = np.concatenate([session.tokens[-self._rules.max_match :], assumed])
            draft = self._draft(session, context, request.num_nodes, session.max_depth(len(assumed)))
            if len(draft):
                drafts.append(replace(draft, assumed=assumed))
            if len(drafts) == request.max_outcomes:
                break
        return drafts


def _prediction(session: Session) -> Name:
    return ("prediction", str(session.uid))
