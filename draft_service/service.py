"""The rpc handlers of DraftService: they check and translate; the drafter does the work."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from functools import partial

import grpc.aio

from draft_service.drafters.base import MAX_PROPOSE_TOKENS, Drafter, TextRequest
from draft_service.drafters.corpora import Corpora
from draft_service.link import Identity
from draft_service.session import MAX_PREDICTION_TOKENS, Wishes
from draft_service.worker import Worker
from outrider import __version__
from outrider.args import DraftArgs
from outrider.errors import RETRY_SOON_S, DeadlineExceeded, InvalidArgument, ResourceExhausted, Unimplemented
from outrider.telemetry import get_logger
from outrider.tree_limits import check_wishes
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from outrider.wire import (
    INT31_MAX,
    MAX_NAME_CHARS,
    WIRE_VERSION,
    Ids,
    check_token_ids,
    pack_ids,
    pack_scores,
    unpack_ids,
)

log = get_logger(__name__)

MAX_PROPOSE_WISH = 256  # steps, branches or nodes that Propose grows
MAX_ROWS = 1024  # steps times branches: sessions wait while a model grows them
MAX_CALLS = 64  # of each kind at once: they hold a message each, and those of Propose are answered one by one
CORPUS_IDLE_S = 60.0  # in which the next text of a corpus must come: a call that waits keeps others out


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Serves plain clients beside the streams to verify services."""

    def __init__(self, args: DraftArgs, drafter: Drafter, worker: Worker, identity: Identity) -> None:
        self._args = args
        self._drafter = drafter
        self._worker = worker
        self._identity = identity
        self._num_calls: Counter[str] = Counter()
        # A long text keeps a core busy for a second, and takes as many nodes as the trie of all may have.
        self._proposing = asyncio.Lock()

    async def Propose(
        self, request: draft_pb2.ProposeRequest, context: grpc.aio.ServicerContext
    ) -> draft_pb2.ProposeResponse:
        """One tree below the last given token."""
        wanted = TextRequest(
            tokens=self._ids(request.tokens, "tokens", 1, MAX_PROPOSE_TOKENS),
            wishes=self._wishes(request.speculative),
            prediction=self._ids(request.prediction_tokens, "prediction_tokens", 0, MAX_PREDICTION_TOKENS),
            corpus_scope=_short(request.corpus_scope, "corpus_scope"),
            vocabulary=self._worker.target.vocab_fingerprint,
            vocab_size=self._vocab_size,
            features=request.features if request.HasField("features") else None,
        )
        with self._one_of("Propose"):
            async with self._proposing:
                start_ns = time.perf_counter_ns()
                draft = await self._drafter.propose(wanted)
        return draft_pb2.ProposeResponse(
            tokens=pack_ids(draft.tokens),
            parents=pack_ids(draft.parents),
            scores=pack_scores(draft.probabilities),
            draft_us=(time.perf_counter_ns() - start_ns) // 1000,
        )

    async def AddCorpus(
        self, request_iterator: AsyncIterator[draft_pb2.AddCorpusRequest], context: grpc.aio.ServicerContext
    ) -> draft_pb2.AddCorpusResponse:
        """Texts of one corpus, each taken in before the next is read."""
        corpora = self._corpora
        scope: str | None = None
        corpus_id = ""
        num_tokens = 0
        with self._one_of("AddCorpus"):
            requests = aiter(request_iterator)
            while (request := await _next(requests)) is not None:
                if scope is None:
                    scope, corpus_id = _names(request)
                _check_same(request, scope, corpus_id)
                tokens = self._ids(request.tokens, "tokens", 1, INT31_MAX)
                await self._done("AddCorpus", corpora.load(scope, corpus_id, tokens))
                num_tokens += len(tokens)
        if scope is None:
            raise InvalidArgument("corpus_id: the stream has no message; it must have at least one", field="corpus_id")
        return draft_pb2.AddCorpusResponse(tokens_added=num_tokens, nodes_used=corpora.corpus.num_nodes)

    async def RemoveCorpus(
        self, request: draft_pb2.RemoveCorpusRequest, context: grpc.aio.ServicerContext
    ) -> draft_pb2.RemoveCorpusResponse:
        """Returns when nothing of it is left."""
        corpora = self._corpora
        with self._one_of("RemoveCorpus"):
            size, removed = corpora.unload(*_names(request))
            await self._done("RemoveCorpus", removed)
        return draft_pb2.RemoveCorpusResponse(tokens_removed=size, nodes_used=corpora.corpus.num_nodes)

    async def GetServerInfo(
        self, request: draft_pb2.DraftServiceGetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> draft_pb2.DraftServiceGetServerInfoResponse:
        """Tells what this process drafts with, and how its links stand."""
        corpora = self._drafter.corpora
        return draft_pb2.DraftServiceGetServerInfoResponse(
            version=__version__,
            wire_version=WIRE_VERSION,
            algorithm=self._drafter.algorithm,
            draft_model=self._drafter.draft_model,
            drafter_id=self._identity.drafter_id,
            links=[
                draft_pb2.VerifyLink(
                    address=link.address,
                    state=link.stats.state,
                    sessions=link.num_sessions,
                    proposals=link.stats.proposals,
                    rounds=link.stats.rounds,
                    connects=link.stats.connects,
                    last_error=link.stats.last_error,
                )
                for link in self._worker.links
            ],
            arguments=self._args.as_flags(),
            corpus_nodes=0 if corpora is None else corpora.corpus.num_nodes,
            corpus_capacity=0 if corpora is None else corpora.corpus.capacity,
            corpora=[
                draft_pb2.CorpusInfo(corpus_id=one.corpus_id, corpus_scope=one.scope, tokens=one.num_tokens)
                for one in (corpora.sizes() if corpora is not None else ())
            ],
        )

    @property
    def _corpora(self) -> Corpora:
        if self._drafter.corpora is None:
            name = common_pb2.Algorithm.Name(self._drafter.algorithm)
            raise Unimplemented(f"{name} drafts with a model; only NGRAM draws from a corpus")
        return self._drafter.corpora

    @contextlib.contextmanager
    def _one_of(self, method: str) -> Iterator[None]:
        open_calls = self._num_calls[method]
        if open_calls >= MAX_CALLS:
            raise ResourceExhausted(
                f"{open_calls} {method} calls are under way; at most {MAX_CALLS} may be", retry_after_s=RETRY_SOON_S
            )
        self._num_calls[method] += 1
        try:
            yield
        finally:
            self._num_calls[method] -= 1

    async def _done(self, method: str, work: Future[None]) -> None:
        """Waits for queued work. It is done also for a caller that goes, whose place among the calls it keeps."""
        done = asyncio.wrap_future(work)
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:
            if not done.done():
                self._num_calls[method] += 1
                done.add_done_callback(partial(self._left, method))
            raise

    def _left(self, method: str, done: asyncio.Future[None]) -> None:
        self._num_calls[method] -= 1
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error("a corpus was not changed, and whoever asked has gone", method=method, exc_info=error)

    @property
    def _vocab_size(self) -> int:
        """The target's, once a verify service has said; until then only negative ids are known to be wrong."""
        return self._worker.target.vocab_size or INT31_MAX

    def _ids(self, data: bytes, field: str, at_least: int, at_most: int) -> Ids:
        ids = unpack_ids(data, field=field)
        if not at_least <= len(ids) <= at_most:
            raise InvalidArgument(f"{field} has {len(ids)} tokens; it must have {at_least} to {at_most}", field=field)
        check_token_ids(ids, vocab_size=self._vocab_size, field=field)
        return ids

    def _wishes(self, params: common_pb2.SpeculativeParams) -> Wishes:
        own = self._drafter.algorithm
        if params.algorithm not in (common_pb2.ALGORITHM_UNSPECIFIED, own):
            raise InvalidArgument(
                f"speculative.algorithm is {params.algorithm}; this drafter's is {common_pb2.Algorithm.Name(own)}",
                field="speculative.algorithm",
            )
        check_wishes(params, MAX_PROPOSE_WISH)
        rows = max(1, params.num_steps) * max(1, params.topk)
        if rows > MAX_ROWS:
            raise InvalidArgument(
                f"speculative.num_steps times speculative.topk is {rows}; it must be at most {MAX_ROWS}",
                field="speculative.topk",
            )
        return Wishes.from_proto(params)


async def _next(requests: AsyncIterator[draft_pb2.AddCorpusRequest]) -> draft_pb2.AddCorpusRequest | None:
    """The stream's next message; None at its end."""
    try:
        async with asyncio.timeout(CORPUS_IDLE_S):
            return await anext(requests, None)
    except TimeoutError:
        raise DeadlineExceeded(f"no text came in {CORPUS_IDLE_S:g} s, and the stream was not ended") from None


def _names(request: draft_pb2.AddCorpusRequest | draft_pb2.RemoveCorpusRequest) -> tuple[str, str]:
    """Scope and id of a corpus."""
    corpus_id = _short(request.corpus_id, "corpus_id", required=True)
    return _short(request.corpus_scope, "corpus_scope"), corpus_id


def _check_same(request: draft_pb2.AddCorpusRequest, scope: str, corpus_id: str) -> None:
    """InvalidArgument where a message after the first names another corpus."""
    for field, told, first in (
        ("corpus_id", request.corpus_id, corpus_id), ("corpus_scope", request.corpus_scope, scope)
    ):  # fmt: skip
        if told and told != first:
            raise InvalidArgument(f"{field} differs from the first message's; a stream has one corpus", field=field)


def _short(text: str, field: str, *, required: bool = False) -> str:
    if len(text) > MAX_NAME_CHARS or (required and not text):
        least = 1 if required else 0
        raise InvalidArgument(
            f"{field} has {len(text)} characters; it must have {least} to {MAX_NAME_CHARS}", field=field
        )
    return text
