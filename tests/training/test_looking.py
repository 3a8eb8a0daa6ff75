"""Attention is taught to look where the wanted token is."""

from __future__ import annotations

import pytest
import torch

from training.kinds import source_layers
from training.looking import Lesson, Taught, teach, whitening

VOCAB, HIDDEN, LENGTH = 40, 48, 70


def lesson(seed: int) -> Lesson:
    """Each token is always followed by the same one; rows tell their token and the one before."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn((VOCAB, HIDDEN // 2), generator=torch.Generator().manual_seed(0))
    tokens = torch.randperm(VOCAB, generator=generator)[: VOCAB // 2].repeat(LENGTH // VOCAB * 2 + 2)[: LENGTH + 2]
    rows = torch.cat([table[tokens[1:-1]], table[tokens[:-2]]], dim=1)
    rows = rows + 0.3 * torch.randn(rows.shape, generator=generator)
    return Lesson(rows, tokens[1:-1], tokens[2:], torch.ones(len(rows), dtype=torch.bool))


def mass_on_right_rows(taught: Taught, one: Lesson) -> float:
    """Attention's mass on right rows, over those rows in whose past there is one."""
    logits = (one.rows @ taught.query.T) @ (one.rows @ taught.key.T).T
    later = torch.ones(logits.shape, dtype=torch.bool).triu(1)
    right = (one.brings == one.wants[:, None]) & ~later
    mass = (logits.masked_fill(later, -torch.inf).softmax(dim=-1) * right).sum(dim=1)
    return float(mass[right.any(dim=1)].mean())


def test_it_finds_what_followed_before() -> None:
    lessons = [lesson(seed) for seed in range(1, 120)]
    taught = teach(lessons, 16, seed=0)
    assert taught.query.shape == taught.key.shape == (16, HIDDEN)
    unseen = lesson(1000)
    assert mass_on_right_rows(taught, unseen) > 0.7
    nothing = Taught(torch.zeros_like(taught.query), taught.key)
    assert mass_on_right_rows(nothing, unseen) < 0.2


def test_the_same_seed_teaches_the_same() -> None:
    lessons = [lesson(seed) for seed in range(1, 6)]
    first, second = teach(lessons, 8, seed=3), teach(lessons, 8, seed=3)
    assert torch.equal(first.query, second.query)
    assert torch.equal(first.key, second.key)


def test_conversations_without_anything_to_copy_teach_nothing_wrong() -> None:
    one = lesson(1)
    unlike = one._replace(wants=one.wants + VOCAB)
    taught = teach([unlike, unlike._replace(counts=torch.zeros_like(one.counts)), one], 8, seed=0)
    assert taught.query.isfinite().all()


def test_whitened_numbers_are_independent() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((500, 8), generator=generator) @ (torch.eye(8) + 0.2 * torch.randn((8, 8), generator=generator))
    white = rows @ whitening(rows)
    torch.testing.assert_close(white.T @ white / len(rows), torch.eye(8), atol=0.02, rtol=0)


@pytest.mark.parametrize(
    ("num_target", "num_draft", "layers"),
    [
        (30, 1, [29]), (30, 2, [0, 29]), (30, 3, [0, None, 29]), (30, 4, [0, 1, None, 29]),
        (30, 6, [0, 1, 2, None, 28, 29]), (2, 3, [0, 0, 1]), (3, 3, [0, None, 2]),
    ],
)  # fmt: skip
def test_layers_of_a_shallow_copy(num_target: int, num_draft: int, layers: list[int | None]) -> None:
    assert source_layers(num_target, num_draft) == layers
