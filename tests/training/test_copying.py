"""Heads that copy find the newest token where it stood before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import ModelConfig
from engine.rope import rope_rows
from kernels.norm import rms_norm
from training.copying import NUM_COPYING, Carried, Copying, Marks, marks_beside
from training.looking import Taught

LENGTH, HIDDEN, VOCAB = 120, 128, 60


@pytest.fixture
def block(target: Path) -> ModelConfig:
    """The target's, with heads and a stream as wide as in earnest."""
    return replace(ModelConfig.from_folder(target), hidden_size=HIDDEN, head_dim=64, rope_theta=1e5)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(0))


def embedded(tokens: torch.Tensor) -> torch.Tensor:
    table = torch.randn((VOCAB, HIDDEN), generator=torch.Generator().manual_seed(1))
    return rms_norm(table[tokens], torch.ones(HIDDEN), 1e-5)


def states() -> torch.Tensor:
    """States with directions that are little used, as a target's have."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn((LENGTH, HIDDEN), generator=generator) * torch.linspace(0.02, 1.5, HIDDEN)


def mass_on_matches(copying: Copying, rows: torch.Tensor, sought: torch.Tensor, held: torch.Tensor) -> float:
    """Mean share of attention that falls on rows whose state tells the token sought, where there are any."""
    length, width = rows.shape
    numbered = torch.cat([rows, torch.eye(length)], dim=1)
    query, key = (torch.nn.functional.pad(matrix, (0, length)) for matrix in (copying.query, copying.key))
    value = torch.eye(width + length)[width:]
    weights = Copying(copying.block, query, key, value).found(numbered, rope_rows(copying.block, length))
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(length))
    assert not weights.triu(1).any()
    same = (sought[:, None] == held).tril()
    return float((weights * same).sum(dim=1)[same.any(dim=1)].mean())


def test_beside(block: ModelConfig, tokens: torch.Tensor) -> None:
    marks = marks_beside(block, embedded(tokens), states(), seed=0)
    rows = torch.cat([embedded(tokens)[1:], marks.marked(states(), embedded(tokens))[:-1]], dim=1)
    assert mass_on_matches(Copying.beside(block, marks), rows, tokens[1:], tokens[:-1]) > 0.6


def test_a_stream_carries_what_was_taught() -> None:
    generator = torch.Generator().manual_seed(4)
    parts, told = torch.randn((LENGTH, 2 * HIDDEN), generator=generator), states()
    taught = Taught(*torch.randn((2, 12, 2 * HIDDEN), generator=generator))
    carried = Carried.choose(taught, parts, told)
    stream = carried.without(told) + parts @ carried.made.T @ carried.directions.T
    query, key, brought = (stream @ matrix.T for matrix in carried.read())
    wanted = (parts @ taught.query.T) @ (parts @ taught.key.T).T
    torch.testing.assert_close(query @ key.T, wanted, atol=1e-2, rtol=1e-4)
    torch.testing.assert_close(carried.without(stream), carried.without(told), atol=1e-4, rtol=1e-4)
    # What is brought is the token, and nothing of the state beside it.
    same_token = torch.cat([parts[:, :HIDDEN], torch.zeros_like(parts[:, HIDDEN:])], dim=1)
    again = same_token @ carried.made.T @ carried.directions.T
    torch.testing.assert_close(again @ carried.read()[2].T, brought, atol=1e-4, rtol=1e-4)
    # A stream that is read at half its size gives the same logits.
    query, key, _ = (stream / 2 @ matrix.T for matrix in carried.scaled(2.0).read())
    torch.testing.assert_close(query @ key.T, wanted, atol=1e-2, rtol=1e-4)


def test_marks_disturb_nothing_else(block: ModelConfig, tokens: torch.Tensor) -> None:
    marks = marks_beside(block, embedded(tokens), states(), seed=0)
    marked = marks.marked(states(), embedded(tokens))
    torch.testing.assert_close(marks.without(marked), marks.without(states()))
    rows = marks.without(torch.randn(VOCAB, HIDDEN))
    torch.testing.assert_close(marked @ rows.T, states() @ rows.T, atol=1e-3, rtol=1e-3)
    assert marks.num_before < marks.num_now


def test_projections_bring_what_was_found(block: ModelConfig, tokens: torch.Tensor) -> None:
    marks = Marks.choose(embedded(tokens), states(), 24, 16, seed=0)
    copying = Copying.beside(block, marks)
    generator = torch.Generator().manual_seed(3)
    # Of no higher rank than the heads together hold.
    brought = torch.randn((HIDDEN, 32), generator=generator) @ torch.randn((32, HIDDEN), generator=generator)
    found = copying.projections(brought, NUM_COPYING)
    rows = torch.randn((5, 2 * HIDDEN), generator=generator)
    made = rows @ found["v_proj"].T @ found["o_proj"].T
    torch.testing.assert_close(made, rows[:, :HIDDEN] @ brought.T, atol=1e-2, rtol=1e-3)
    assert found["q_proj"].shape == found["k_proj"].shape == (NUM_COPYING * 64, 2 * HIDDEN)
