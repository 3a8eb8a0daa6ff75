"""A step's draws: every work's rows go to its session's sampler, and what its request wants to see is read off them.

Logits that lie on a device stay there (device_sampler.py); the rule itself is in session_sampler.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.acceptance import Accepted, settled
from outrider.tree import TokenTree
from verify_service.device_sampler import DeviceSampler
from verify_service.logprobs import token_logprob
from verify_service.work import Work

_EMPTY = TokenTree.empty()
_UNSEEN = np.empty((0, 0), np.float32)


def _takes_highest(work: Work) -> bool:
    """Whether a work's outcome follows from its rows' highest logits, and nothing else is wanted of them."""
    session = work.session
    shows = session.logprobs or session.include_trees or session.wants_prompt_rows
    return session.sampler.takes_highest and not shows


class Sampler:
    """Draws for a whole step."""

    def __init__(self) -> None:
        self._on_device: DeviceSampler | None = None

    def prepare(self, works: Sequence[Work]) -> None:
        """Makes the links of the trees that are walked when the logits are there, or soon after; another thread may."""
        for work in works:
            if work.match is not None:
                _ = work.match.tree.links

    def accept(
        self, works: Sequence[Work], logits: torch.Tensor, likeliest: list[int] | None = None
    ) -> list[Accepted | None]:
        """Each work's outcome; None for a prefill chunk, or where a row had no distribution (NaN in the model).

        logits: fp32 [the works' num_logits together, V], on the runner's device; likeliest: as the runner found it.
        """
        if likeliest is None and logits.device.type != "cpu":
            self._on_device = self._on_device or DeviceSampler(logits.device)
            return self._on_device.accept(works, logits)
        rows: NDArray[np.float32] | None = None  # made when somebody looks: right after a step that takes a while
        outcomes: list[Accepted | None] = []
        first = 0
        for work in works:
            end = first + work.num_logits
            if likeliest is not None and _takes_highest(work):
                outcomes.append(self._accept_one(work, _UNSEEN, likeliest[first:end]))
            else:
                rows = logits.numpy() if rows is None else rows
                outcomes.append(
                    self._accept_one(work, rows[first:end], None if likeliest is None else likeliest[first:end])
                )
            first = end
        return outcomes

    def _accept_one(self, work: Work, rows: NDArray[np.float32], likeliest: list[int] | None) -> Accepted | None:
        session = work.session
        if session.wants_prompt_rows:
            following = session.prompt_after(len(rows)).tolist()
            session.add_prompt_logprobs(
                token_logprob(row, token, session.num_top_logprobs)
                for row, token in zip(rows, following, strict=False)  # the prompt's last row is followed by none
            )
        if not work.samples:
            return None
        tree = work.match.tree if work.match is not None else _EMPTY
        own = rows if rows is _UNSEEN else rows[-(len(tree) + 1) :]
        named = None if likeliest is None else likeliest[-(len(tree) + 1) :]
        outcome = settled(session.sampler.accept(own, tree, session.output_len, named), tree.words)
        if outcome is None:
            return None
        if session.include_trees and len(tree):
            work.probabilities = session.sampler.node_probabilities(own, tree)
        if session.logprobs:
            work.logprobs = session.sampler.path_logprobs(own, tree, outcome, session.num_top_logprobs)
        return outcome
