"""Which proposal is verified: matching, re-rooting and going stale. Pure state, no sockets, no tensors.

A proposal names a committed length it has seen (`base_len`), tokens it assumes from there on, and a tree below the last
of them. It matches when what was committed since walks through all it assumes and then zero or more of its own nodes;
what is verified is the subtree below the end of that walk. docs/protocol.md tells the rules in words.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidArgument
from outrider.tree import ROOT, TokenTree
from outrider.wire import Ids
from verify_service.grammar import GrammarState, pruned


class Refusal(enum.Enum):
    """Why a proposal is not kept; names are those of the wire's RejectReason, values the metric's labels."""

    STALE = "stale"
    REPLAYED = "replayed"
    FOREIGN = "foreign"
    MALFORMED = "malformed"
    CROWDED = "crowded"


class Refused(NamedTuple):
    """A proposal that is not kept. detail: where it went stale, in words, if that was asked for."""

    proposal_id: int
    why: Refusal
    detail: str = ""


@dataclass(eq=False, slots=True)  # not frozen: there are many each step, and those take twice as long to make
class Proposal:
    """A tree as a drafter sent it, its form already checked.

    assumed: int32 [a]; scores: uint8 [n], none below its parent's, or empty for unknown; from_prediction: bool [n]
    or empty.
    """

    proposal_id: int
    base_len: int
    assumed: Ids
    tree: TokenTree
    scores: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    from_prediction: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    draft_us: int = 0
    tree_len: int = field(init=False)  # committed length at which its own root is the newest token

    def __post_init__(self) -> None:
        self.tree_len = self.base_len + len(self.assumed)
        if len(self.scores) != len(self.tree):
            self.scores = np.zeros(len(self.tree), np.uint8)

    @property
    def is_early(self) -> bool:
        """Whether it was made before its root was committed."""
        return len(self.assumed) > 0


@dataclass(eq=False, slots=True)
class Match:
    """What can be verified now: the nodes of `proposal` below `root_node`.

    nodes: int32 [n], the nodes' indices in the proposal as sent; scores: uint8 [n], of the paths from `root_node` on,
    zeros where unknown.
    """

    proposal: Proposal
    root_node: int
    tree: TokenTree
    nodes: NDArray[np.int32]
    scores: NDArray[np.uint8]

    def kept(self, count: int, max_depth: int) -> Match:
        """The `count` likeliest nodes no deeper than `max_depth`."""
        if count >= len(self.tree) and max_depth >= self.tree.depth:
            return self
        tree, kept = self.tree.trimmed(self.scores, count, max_depth)
        return self._with(tree, kept)

    def allowed_by(self, grammar: GrammarState) -> Match:
        """The nodes whose paths a grammar allows."""
        return self._with(*pruned(self.tree, grammar))

    def _with(self, tree: TokenTree, kept: NDArray[np.int32]) -> Match:
        if tree is self.tree:
            return self
        return Match(self.proposal, self.root_node, tree, self.nodes[kept], self.scores[kept])


class _Standing(enum.Enum):
    PENDING = enum.auto()  # less is committed than it assumes, and agrees
    MATCHES = enum.auto()
    DECLINES = enum.auto()  # no nodes, and its position is the newest
    STALE = enum.auto()


@dataclass(slots=True)
class _Walk:
    """How far what is committed has been followed into a proposal."""

    proposal: Proposal
    pos: int  # committed length followed so far, or up to where the walk broke
    node: int = ROOT  # where the walk stands once all assumed tokens are confirmed
    used: bool = False  # verified at least once
    standing: _Standing = _Standing.PENDING

    def follow(self, committed: Ids, committed_len: int) -> _Standing:
        """Takes the walk on to `committed_len`; a stale walk stays stale."""
        if self.standing is _Standing.STALE:
            return _Standing.STALE
        proposal, node = self.proposal, self.node
        tree_len, links = proposal.tree_len, proposal.tree.links
        longest = tree_len + len(proposal.tree) + 1  # by which every walk has ended: what follows is not looked at
        for pos, token in enumerate(committed[self.pos : min(committed_len, longest)].tolist(), self.pos):
            if pos < tree_len:
                child = node if proposal.assumed[pos - proposal.base_len] == token else None
            else:
                siblings = links.get(node)
                child = None if siblings is None else siblings.get(token)
            if child is None:
                self.pos, self.node, self.standing = pos, node, _Standing.STALE
                return _Standing.STALE
            node = child
        self.pos, self.node = committed_len, node
        if committed_len < tree_len:
            self.standing = _Standing.PENDING
        elif node in links:
            self.standing = _Standing.MATCHES
        else:
            self.standing = _Standing.STALE if links else _Standing.DECLINES
        return self.standing

    def stale(self, committed: Ids, *, explain: bool) -> Refused:
        """The refusal of a stale walk's proposal."""
        return Refused(self.proposal.proposal_id, Refusal.STALE, self._break(committed) if explain else "")

    def _break(self, committed: Ids) -> str:
        place = "the root" if self.node == ROOT else f"node {self.node}"
        if self.pos == len(committed):
            return f"{place} is committed at {self.pos - 1}, and nothing hangs below it"
        token, guess = committed[self.pos], self.pos - self.proposal.base_len
        if self.pos < self.proposal.tree_len:
            return f"assumed[{guess}] is {self.proposal.assumed[guess]}; {token} is committed at {self.pos}"
        return f"no child of {place} is {token}, which is committed at {self.pos}"


class ProposalBook:
    """One session's proposals from one drafter, for one generation.

    `committed` arguments are all committed tokens; their length only grows between calls.
    """

    def __init__(self, *, prompt_len: int, max_kept: int, max_assumed: int) -> None:
        self._prompt_len = prompt_len
        self._max_kept = max_kept
        self._max_assumed = max_assumed
        self._last_id = 0
        self._declined_len = 0  # the largest that was declined when it had passed
        self.num_idle = 0  # declines after that of no larger one: who sends many of them has nothing else to say
        self._kept: list[_Walk] = []  # oldest first
        self._verifying: _Walk | None = None

    def __len__(self) -> int:
        """Proposals kept, the one being verified included."""
        return len(self._kept) + (self._verifying is not None)

    def add(self, proposal: Proposal, committed: Ids, *, explain: bool = False) -> list[Refused]:
        """Keeps a proposal; returns what was refused or pushed out. explain: in words where it is stale.

        InvalidArgument when it breaks a rule that only this session's state can tell: the session is quarantined.
        """
        if proposal.proposal_id <= self._last_id:
            if proposal.proposal_id < 1:  # as it is where nobody set it
                raise InvalidArgument(f"proposal_id is {proposal.proposal_id}; ids begin at 1", field="proposal_id")
            return [Refused(proposal.proposal_id, Refusal.REPLAYED)]
        self._check(proposal, len(committed))
        self._last_id = proposal.proposal_id
        walk = _Walk(proposal, pos=proposal.base_len)
        if walk.follow(committed, len(committed)) is _Standing.STALE:
            if len(proposal.tree):
                return [walk.stale(committed, explain=explain)]
            # A decline whose position has passed has nothing to be stale.
            self.num_idle += proposal.tree_len <= self._declined_len
            self._declined_len = max(self._declined_len, proposal.tree_len)
            return []
        self._kept.append(walk)
        refused: list[Refused] = []
        while len(self._kept) > self._max_kept:
            crowded = self._kept.pop(0)
            if not crowded.used:  # else its credit is news enough, which may come later than this
                refused.append(Refused(crowded.proposal.proposal_id, Refusal.CROWDED))
        return refused

    def advance(self, committed: Ids, *, explain: bool = False) -> list[Refused]:
        """Follows newly committed tokens; returns the proposals that went stale unused. explain: in words."""
        stale: list[Refused] = []
        verified, self._verifying = self._verifying, None
        kept: list[_Walk] = []
        for walk in self._kept if verified is None else [verified, *self._kept]:
            if walk.follow(committed, len(committed)) is not _Standing.STALE:
                kept.append(walk)
            elif not walk.used and len(walk.proposal.tree):
                stale.append(walk.stale(committed, explain=explain))
        if len(kept) > 1:
            kept.sort(key=lambda walk: walk.proposal.proposal_id)
        self._kept = kept
        return stale

    def match(self) -> Match | None:
        """The proposal to verify at the length last seen: largest base_len, then largest id."""
        best: _Walk | None = None
        for walk in self._kept:  # by id: the later of equals
            if walk.standing is _Standing.MATCHES and (
                best is None or walk.proposal.base_len >= best.proposal.base_len
            ):
                best = walk
        if best is None:
            return None
        proposal, scores = best.proposal, best.proposal.scores
        tree, nodes = proposal.tree.subtree(best.node)
        if best.node != ROOT:
            # Given that the root has come true: a constant, so the nodes' order stays as the drafter has it.
            scores = scores[nodes] - scores[best.node]
        return Match(proposal, best.node, tree, nodes, scores)

    def declined(self) -> bool:
        """Whether the drafter has said that it proposes nothing at the length last seen."""
        return any(walk.standing is _Standing.DECLINES for walk in self._kept)

    def begin(self, match: Match) -> None:
        """Takes the matched proposal as the one being verified, beside those that are kept."""
        for index, walk in enumerate(self._kept):
            if walk.proposal is match.proposal:
                self._verifying = self._kept.pop(index)
                walk.used = True
                return
        raise ValueError(f"proposal {match.proposal.proposal_id} is not kept")

    def _check(self, proposal: Proposal, committed_len: int) -> None:
        if not self._prompt_len <= proposal.base_len <= committed_len:
            raise InvalidArgument(
                f"base_len is {proposal.base_len}; it must be from the prompt's {self._prompt_len} to {committed_len}",
                field="base_len",
            )
        if len(proposal.assumed) > self._max_assumed:
            raise InvalidArgument(
                f"assumed has {len(proposal.assumed)} tokens; at most {self._max_assumed} are taken", field="assumed"
            )
