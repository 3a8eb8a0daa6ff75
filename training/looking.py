"""Where heads that copy should look, taught before anything else.

A row brings a token, and wants the one that comes next. Attention is right where it falls on rows that bring what is
wanted. Queries and keys of a few dozen numbers are taught that alone, by the mass of attention on such rows, over the
target's own answers: no vocabulary, no other layer, seconds of work. They begin as the canonical correlations between a
row and the next, whose key is the best of answers: what came after something like this before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

_LEARNING_RATE = 1e-3
_EPOCHS = 2
# Logits at the start, as a share of the evidence that a pair belongs together.
_SHARPNESS = 0.15
# Correlations that count as this at most.
_HIGHEST = 0.97
_RIDGE = 1e-4
_WHITENED_ROWS = 50_000


class Lesson(NamedTuple):
    """A conversation: rows [L, width] with the token that each brings and the one that it wants, int64 [L]."""

    rows: torch.Tensor
    brings: torch.Tensor
    wants: torch.Tensor
    counts: torch.Tensor
    """bool [L]: rows whose wanted token is the target's."""


class Taught(NamedTuple):
    """Queries and keys of a row [., width]; their product is the logit."""

    query: torch.Tensor
    key: torch.Tensor


def teach(lessons: Sequence[Lesson], size: int, *, seed: int) -> Taught:
    """Teaches queries and keys of at most `size` numbers to find what the lessons want."""
    before, after = _neighbours(lessons)
    whiten = whitening(before)
    left, found, right = torch.linalg.svd((before @ whiten).T @ (after @ whiten) / len(before))
    found = (found[:size] / found[0].clamp(min=1)).clamp(max=_HIGHEST)
    gain = (_SHARPNESS * found / (1 - found.square())).sqrt()
    generator = torch.Generator().manual_seed(seed)
    with torch.enable_grad():
        query, key = ((side[:, :size] * gain).clone().requires_grad_() for side in (left, right.T))
        optimizer = torch.optim.Adam([query, key], lr=_LEARNING_RATE)
        order = [index for _ in range(_EPOCHS) for index in torch.randperm(len(lessons), generator=generator).tolist()]
        for step, index in enumerate(order):
            loss = _loss(lessons[index], whiten, query, key)
            if loss is None:
                continue
            for group in optimizer.param_groups:
                group["lr"] = _LEARNING_RATE * (1 - step / len(order))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return Taught((whiten @ query.detach()).T.contiguous(), (whiten @ key.detach()).T.contiguous())


def whitening(rows: torch.Tensor) -> torch.Tensor:
    """[width, width]: makes the numbers of rows [T, width] independent and of size 1."""
    sizes, vectors = torch.linalg.eigh(rows.T @ rows / len(rows))
    return vectors * (sizes.clamp(min=0) + _RIDGE * sizes.mean()).rsqrt()


def _neighbours(lessons: Sequence[Lesson]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that count and those after them, [T, width] each."""
    before, after, count = [], [], 0
    for one in lessons:
        before.append(one.rows[:-1][one.counts[:-1]])
        after.append(one.rows[1:][one.counts[:-1]])
        count += len(before[-1])
        if count >= _WHITENED_ROWS:
            break
    return torch.cat(before), torch.cat(after)


def _loss(lesson: Lesson, whiten: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Minus the log of the mass on rows that bring what is wanted, where there are any."""
    seen = torch.ones((len(lesson.rows),) * 2, dtype=torch.bool).tril()
    right = (lesson.brings == lesson.wants[:, None]) & seen
    chosen = right.any(dim=1) & lesson.counts
    if not chosen.any():
        return None
    rows = lesson.rows @ whiten
    logits = (rows[chosen] @ query) @ (rows @ key).T
    mass = logits.masked_fill(~seen[chosen], -torch.inf).log_softmax(dim=-1)
    return -mass.masked_fill(~right[chosen], -torch.inf).logsumexp(dim=-1).mean()
