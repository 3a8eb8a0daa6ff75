"""What trees would have given: each is followed by what is committed after it, verified or not. Pure state.

Output depends on no draft, so a tree that nobody verified is judged by the tokens that came all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.tree import ROOT, TokenTree
from outrider.wire import Ids
from verify_service.proposals import Match


@dataclass(eq=False, slots=True)
class Judged:
    """A tree whose walk has ended. scores: uint8 [n]; true: the nodes that came true, a path."""

    tree: TokenTree
    scores: NDArray[np.uint8]
    true: list[int]


class Hindsight:
    """Follows one tree of a session at a time; each proposal once, at the first length it matches."""

    def __init__(self) -> None:
        self._tree: TokenTree | None = None
        self._scores = np.empty(0, np.uint8)
        self._path: list[int] = []
        self._pos = 0
        self._last_id = 0

    @property
    def is_watching(self) -> bool:
        """Whether a tree is followed."""
        return self._tree is not None

    def watch(self, match: Match, committed_len: int) -> None:
        """Begins to follow a tree below the newest of `committed_len` tokens, unless one is followed already."""
        if self._tree is None and match.proposal.proposal_id > self._last_id and len(match.tree):
            self._last_id = match.proposal.proposal_id
            self._tree, self._scores = match.tree, match.scores
            self._path, self._pos = [], committed_len

    def follow(self, committed: Ids) -> Judged | None:
        """Takes in what was committed since; the tree, once it is known how far it came true."""
        tree = self._tree
        if tree is None:
            return None
        node = self._path[-1] if self._path else ROOT
        for token in committed[self._pos :].tolist():
            child = tree.child(node, token)
            self._pos += 1
            if child is not None:
                self._path.append(child)
                node = child
            if child is None or not tree.has_children(child):
                self._tree = None
                return Judged(tree, self._scores, self._path)
        return None
