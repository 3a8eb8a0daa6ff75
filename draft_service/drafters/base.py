"""The interface of drafters: what makes trees, batched over sessions, and knows no network.

Drafters are told of sessions by the calls below, always in this order within a round: open, add_features, extend,
close, then draft or draft_ahead. They are called from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from draft_service.session import Extension, Grown, Session, Wishes
from draft_service.sessions import InVerification
from outrider.tree import TokenTree
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import INT31_MAX, Ids

if TYPE_CHECKING:  # it brings numba, and whoever reads flags wants none of it
    from draft_service.drafters.corpora import Corpora

MAX_PROPOSE_TOKENS = 262_144

_NO_IDS = np.empty(0, np.int32)
_NO_BITS = np.empty(0, np.bool_)
_NO_CHANCES = np.empty(0, np.float64)


@dataclass(eq=False, slots=True)  # not frozen: there is one a session and step, and those take twice as long to make
class Draft:
    """A tree below the last of `assumed`, or below the newest committed token when that is empty.

    tokens, parents: int32 [n], -1 the root; probabilities: float64 [n], of the paths; from_prediction: bool [n], or
    empty for none; assumed: int32 [a], guesses for what will be committed next; memo: what the drafter wants back with
    the tree when it is being verified; grown: how a draft model made it.
    """

    tokens: Ids = field(default_factory=lambda: _NO_IDS)
    parents: Ids = field(default_factory=lambda: _NO_IDS)
    probabilities: NDArray[np.float64] = field(default_factory=lambda: _NO_CHANCES)
    from_prediction: NDArray[np.bool_] = field(default_factory=lambda: _NO_BITS)
    assumed: Ids = field(default_factory=lambda: _NO_IDS)
    memo: object = None
    grown: Grown | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def tree(self) -> TokenTree:
        """The tree with its links."""
        return TokenTree(self.tokens, self.parents)


NO_DRAFT: Final = Draft()


@dataclass(slots=True, eq=False)
class DraftRequest:
    """Asks for a tree of at most `num_nodes` nodes at a session's committed state."""

    session: Session
    num_nodes: int


@dataclass(frozen=True, slots=True)
class AheadRequest:
    """Asks for trees below the likeliest outcomes of a step that is about to run.

    At most `max_outcomes` drafts of at most `num_nodes` nodes, each assuming at most `max_assumed` tokens (1 or more).
    left: whether a verdict has come meanwhile that commits something else than these tokens; any thread may ask.
    """

    verifying: InVerification
    num_nodes: int
    max_assumed: int
    max_outcomes: int
    left: Callable[[Ids], bool] = lambda assumed: False


@dataclass(frozen=True, slots=True)
class TextRequest:
    """Asks for one tree after `tokens`, without a session, of ids below `vocab_size`.

    features: the target's rows [len(tokens) - 1, width], for drafters that read them.
    """

    tokens: Ids
    wishes: Wishes = field(default_factory=Wishes)
    prediction: Ids = field(default_factory=lambda: _NO_IDS)
    corpus_scope: str = ""
    vocabulary: str = ""  # fingerprint, empty: unknown
    vocab_size: int = INT31_MAX
    features: common_pb2.Tensor | None = None


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A session that the drafter has forgotten, and why: verify must be told."""

    session: Session
    reason: verify_pb2.ReleaseReason
    detail: str


class Drafter(Protocol):
    """Makes trees. Only `propose` may be called, and `corpora` used, while another call runs."""

    algorithm: common_pb2.Algorithm
    draft_model: str
    num_draft_tokens: int  # nodes of a tree, root included, where the request does not say
    features: common_pb2.FeatureLayout  # the target's rows that it needs
    target: common_pb2.ModelInfo  # what it was made for, for Enlist: sizes and vocabulary, as far as known
    inline: bool  # calls take microseconds: they may run on the event loop

    @property
    def corpora(self) -> Corpora | None:
        """Texts that files and programs gave it to draw from; None where drafts come from a model."""
        ...

    def open(self, sessions: Sequence[Session]) -> None:
        """Takes sessions on, with the tokens that they have."""
        ...

    def add_features(self, rows: Sequence[tuple[Session, common_pb2.FeatureRows]]) -> None:
        """Takes rows of prompts, and rows that were computed again."""
        ...

    def extend(self, extensions: Sequence[Extension]) -> None:
        """Takes committed tokens, and the rows that come with them."""
        ...

    def close(self, sessions: Sequence[Session]) -> None:
        """Forgets sessions."""
        ...

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """A tree for each request; an empty one declines."""
        ...

    def draft_ahead(self, requests: Sequence[AheadRequest]) -> list[list[Draft]]:
        """Trees for likely outcomes, for each request; likeliest first. Stops when all of a request's are left."""
        ...

    def num_nodes(self, wishes: Wishes) -> int:
        """Nodes of a tree for a request with these wishes, root not included."""
        ...

    def is_brief(self, sessions: Sequence[Session]) -> bool:
        """Whether drafting for these is soon done: no text has to be read first, and no other call is under way."""
        ...

    def take_given_up(self) -> list[GivenUp]:
        """Sessions that it gave up since the last call: it knows them no more."""
        ...

    def warm_up(self) -> None:
        """Does what would make the first calls slow."""
        ...

    async def propose(self, request: TextRequest) -> Draft:
        """A tree without a session. InvalidArgument for a text that it cannot read, or without the rows it needs."""
        ...

    def close_down(self) -> None:
        """Frees what it holds; no call follows."""
        ...
