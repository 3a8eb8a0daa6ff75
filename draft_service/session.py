"""One session as its drafter knows it: its tokens, what may still be drafted, and what was proposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidArgument
from outrider.row_ring import RowReader
from outrider.tree import TokenTree
from outrider.tree_limits import MAX_WISH, WISHES
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import INT31_MAX, MAX_NAME_CHARS, Ids, check_token_ids, unpack_ids

MAX_PREDICTION_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the request asks of speculation; None: the drafter decides."""

    num_steps: int | None = None
    topk: int | None = None
    num_draft_tokens: int | None = None  # root included

    @property
    def has_any(self) -> bool:
        """Whether the request fixes anything."""
        return not (self.num_steps is None and self.topk is None and self.num_draft_tokens is None)

    @classmethod
    def from_proto(cls, pb: common_pb2.SpeculativeParams) -> Wishes:
        """Reads a request's wishes, each held to what a drafter can do (1 to MAX_WISH)."""
        return cls(**{name: min(max(1, getattr(pb, name)), MAX_WISH) for name in WISHES if pb.HasField(name)})


class Grown(NamedTuple):
    """How a draft model made a tree, or those that grew together, which share this object.

    cut_short: it might have gone deeper, and that did not seem to be worth it.
    """

    topk: int
    num_steps: int  # that were run
    cut_short: bool = False


class Copied(NamedTuple):
    """Memo of a copy of the session's own text: so many tokens before it stood before what was copied too."""

    match_len: int


@dataclass(eq=False)
class Sent:
    """A proposal as it went out. scores: a byte a node; memo, grown: what its draft came with."""

    proposal_id: int
    base_len: int
    assumed: Ids
    tokens: Ids
    parents: Ids
    scores: bytes
    memo: object = None
    grown: Grown | None = None

    @property
    def end_len(self) -> int:
        """Committed length at which, at the latest, none of its nodes can be verified any more."""
        depth = len(self.tokens) if self.grown is None else self.grown.num_steps
        return self.base_len + len(self.assumed) + depth

    @cached_property
    def tree(self) -> TokenTree:
        """The tree, with its links."""
        return TokenTree(self.tokens, self.parents)

    @cached_property
    def raised_scores(self) -> NDArray[np.uint8]:
        """uint8 [n]: each node's score, at least its parent's."""
        return self.tree.raised(np.frombuffer(self.scores, np.uint8))


@dataclass(eq=False)
class Session:
    """State of one (session, generation); `uid` is unique in this process, whichever verify service it is from."""

    uid: int
    session_id: int  # the number on the wire
    generation: int
    prompt_len: int
    remaining: int  # tokens that may still be committed
    vocabulary: str  # fingerprint, empty: unknown
    vocab_size: int
    wishes: Wishes
    corpus_scope: str
    prediction: Ids
    tokens: Ids  # all committed ones
    traceparent: str = ""  # where drafts for it are traced
    ring: RowReader | None = None  # where its feature rows may lie
    shares_prefix: bool = False  # another session that is open here has the same prompt
    node_budget: int | None = None  # None: verify has set none
    following: verify_pb2.Next = field(default_factory=verify_pb2.Next)
    last_proposal_id: int = 0
    declined_len: int = 0  # length at which it was last said that there is nothing to propose
    hoped_len: int = 0  # longest committed length that an early proposal was for
    sent: dict[int, Sent] = field(default_factory=dict)  # by proposal_id, oldest first
    _buffer: Ids = field(default_factory=lambda: np.empty(0, np.int32), repr=False)

    def __post_init__(self) -> None:
        self._buffer = self.tokens

    @property
    def is_text(self) -> bool:
        """Whether it stands for a text that is no session's: these have uids below 0."""
        return self.uid < 0

    @property
    def key(self) -> tuple[int, int]:
        """The session's number and generation, against which its messages are checked."""
        return self.session_id, self.generation

    def commit(self, tokens: Sequence[int] | Ids) -> None:
        """Appends committed tokens. Views of `tokens` taken before stay as they are."""
        old_len, new_len = len(self.tokens), len(self.tokens) + len(tokens)
        if new_len > len(self._buffer) or not self._buffer.flags.writeable:
            self._buffer = np.empty(max(2 * new_len, 256), np.int32)
            self._buffer[:old_len] = self.tokens
        self._buffer[old_len:new_len] = tokens
        self.tokens = self._buffer[:new_len]
        self.remaining = max(0, self.remaining - len(tokens))
        for sent in self.sent.values():
            # A draft model's memo may hold what it gave for all sessions; a copy's is read when it is accounted for.
            if sent.memo is not None and sent.end_len <= new_len and not isinstance(sent.memo, Copied):
                sent.memo = None

    def max_depth(self, num_assumed: int = 0) -> int:
        """Deepest node below `num_assumed` tokens that can still be accepted: a step commits one token more."""
        return max(0, min(self.wishes.num_steps or MAX_WISH, self.remaining - num_assumed - 1))

    @classmethod
    def from_opened(
        cls, opened: verify_pb2.Opened, *, uid: int, vocabulary: str, vocab_size: int, context_length: int
    ) -> Session:
        """Reads an Opened. vocab_size, context_length: 0 where verify has not said. InvalidArgument for nonsense."""
        vocab_size = vocab_size or INT31_MAX
        tokens = unpack_ids(opened.tokens, field="tokens")
        check_token_ids(tokens, vocab_size=vocab_size, field="tokens")
        if opened.generation < 1:
            raise InvalidArgument(f"generation is {opened.generation}; it starts at 1", field="generation")
        if not 1 <= opened.prompt_len <= len(tokens):
            raise InvalidArgument(
                f"prompt_len is {opened.prompt_len}; it must be from 1 to the {len(tokens)} tokens", field="prompt_len"
            )
        if len(tokens) > (context_length or INT31_MAX):
            raise InvalidArgument(f"{len(tokens)} tokens exceed the context of {context_length}", field="tokens")
        prediction = unpack_ids(opened.prediction_tokens, field="prediction_tokens")[:MAX_PREDICTION_TOKENS]
        check_token_ids(prediction, vocab_size=vocab_size, field="prediction_tokens")
        return cls(
            uid=uid,
            session_id=opened.session,
            generation=opened.generation,
            prompt_len=opened.prompt_len,
            remaining=min(opened.remaining_tokens, opened.remaining_context),
            vocabulary=vocabulary,
            vocab_size=vocab_size,
            wishes=Wishes.from_proto(opened.speculative),
            corpus_scope=opened.corpus_scope,
            prediction=prediction,
            tokens=tokens,
            traceparent=opened.traceparent[:MAX_NAME_CHARS],
        )


@dataclass(eq=False, slots=True)
class Extension:
    """Newly committed tokens of a session: those from base_len on. `verdict` has the features and the step's cost.

    copied: what was verified was a copy, which says nothing of what the drafter makes.
    """

    session: Session
    base_len: int
    verdict: verify_pb2.Verdict
    copied: bool = False
