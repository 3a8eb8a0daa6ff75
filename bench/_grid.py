"""The settings that SGLang's bench_speculative.py tries, each tree once, and which of them it leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

BATCH_SIZES = [1, 2, 4, 8, 16]
STEPS = [0, 1, 3, 5, 7]
TOPKS = [0, 1, 2, 4, 8]
DRAFT_TOKENS = [0, 2, 4, 8, 16, 32]


@dataclass(frozen=True)
class Setting:
    """One line of the grid. All three at 0: no speculation. NGRAM has draft tokens alone."""

    batch_size: int
    steps: int
    topk: int
    num_draft_tokens: int

    @property
    def speculates(self) -> bool:
        """Whether anything is drafted."""
        return self.num_draft_tokens > 0

    def asked(self) -> dict[str, Any]:
        """The request's `speculative` object."""
        if not self.speculates:
            return {"enabled": False}
        tree = {"num_steps": self.steps, "topk": self.topk} if self.steps else {}
        return {**tree, "num_draft_tokens": self.num_draft_tokens}

    def flags(self, algorithm: str) -> str:
        """Flags for `outrider serve`."""
        if not self.speculates:
            return "--speculative-algorithm NONE"
        # Trees that a request fixes are verified whole; --speculative-num-steps has `serve` do so too.
        tree = f"--speculative-num-steps {self.steps} --speculative-eagle-topk {self.topk}"
        own = tree if self.steps else "--disable-speculation-brake"
        return f"--speculative-algorithm {algorithm} {own} --speculative-num-draft-tokens {self.num_draft_tokens}"


def grid(
    batch_sizes: Sequence[int],
    steps: Sequence[int],
    topks: Sequence[int],
    draft_tokens: Sequence[int],
    *,
    ngram: bool = False,
) -> list[Setting]:
    """SGLang's order and its two rules: a tree must be able to hold its tokens, and all or none are 0.

    A chain's tokens follow its steps, as they do with `outrider serve`'s flags.
    """
    if ngram:
        return [Setting(batch, 0, 0, tokens) for batch, tokens in product(batch_sizes, draft_tokens)]
    found = [
        Setting(batch, depth, topk, depth + 1 if topk == 1 else tokens)
        for batch, depth, topk, tokens in product(batch_sizes, steps, topks, draft_tokens)
        if depth * topk + 1 >= tokens and len({number > 0 for number in (depth, topk, tokens)}) == 1
    ]
    return list(dict.fromkeys(found))


def best(rows: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The fastest row of each batch size."""
    fastest: dict[int, dict[str, Any]] = {}
    for row in rows:
        held = fastest.get(row["batch_size"])
        if held is None or row["speed"] > held["speed"]:
            fastest[row["batch_size"]] = row
    return fastest
