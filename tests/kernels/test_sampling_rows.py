"""Draws on a device, by torch and by Triton, against kernels.sampling, which draws one row at a time on the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.sampling import Filters, draw, filtered_row
from kernels.sampling_torch import RowFilters, draw_rows, filtered_probs_rows
from tests.kernels.interpreted import run_under_the_interpreter

CPU = torch.device("cpu")
SOME = st.builds(
    Filters,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 5000]),
    top_p=st.sampled_from([1.0, 1.0, 0.001, 0.4, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
)
Draw = Callable[..., torch.Tensor]


def random_logits(rng: np.random.Generator, num_rows: int, vocab: int) -> np.ndarray:
    """fp32, with equal logits, -inf, zeros of both signs, and now and then a row without a distribution."""
    logits = (rng.normal(size=(num_rows, vocab)) * rng.choice([0.0, 1.0, 4.0])).astype(np.float32)
    logits = logits.round(int(rng.integers(0, 3)))
    logits[rng.random(logits.shape) < 0.05] = -math.inf
    logits[rng.random(logits.shape) < 0.05] = -0.0
    for value in (math.nan, math.inf):
        if rng.random() < 0.2:
            logits[rng.integers(num_rows), rng.integers(vocab)] = value
    if rng.random() < 0.1:
        logits[rng.integers(num_rows)] = -math.inf
    return logits


def expected(logits: np.ndarray, filters: list[Filters], u: np.ndarray) -> list[int]:
    return [draw(row, each, float(x)) for row, each, x in zip(logits, filters, u, strict=True)]


def check(draw_them: Draw, device: torch.device, seed: int, filters: list[Filters], vocab: int) -> None:
    rng = np.random.default_rng(seed)
    logits, u = random_logits(rng, len(filters) + 2, vocab), rng.random(len(filters))
    u[rng.random(len(filters)) < 0.1] = 0.0
    rows = rng.permutation(len(logits))[: len(filters)]
    arrays = (torch.from_numpy(array).to(device) for array in (logits, rows, u))
    there, chosen, uniform = arrays
    tokens = draw_them(there, chosen, RowFilters.of(filters, device), uniform)
    assert tokens.tolist() == expected(logits[rows], filters, u)


@settings(deadline=None, max_examples=300)
@given(seed=st.integers(0, 2**32), filters=st.lists(SOME, min_size=1, max_size=6), vocab=st.sampled_from([1, 5, 300]))
def test_torch_draws_what_the_host_draws(seed: int, filters: list[Filters], vocab: int) -> None:
    check(draw_rows, CPU, seed, filters, vocab)


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32), filters=st.lists(SOME, min_size=1, max_size=6), vocab=st.sampled_from([1, 5, 300]))
def test_torchs_distributions_are_the_hosts(seed: int, filters: list[Filters], vocab: int) -> None:
    logits = random_logits(np.random.default_rng(seed), len(filters), vocab)
    probs = filtered_probs_rows(torch.from_numpy(logits), RowFilters.of(filters, CPU)).numpy()
    for row, each, found in zip(logits, filters, probs, strict=True):
        wanted = filtered_row(row, each)
        np.testing.assert_allclose(found, np.zeros(vocab) if wanted is None else wanted, atol=1e-12)


def test_many_rows_go_in_batches() -> None:
    rng = np.random.default_rng(3)
    logits, u = rng.normal(size=(200, 40)).astype(np.float32), rng.random(200)
    filters = [Filters(temperature=0.8, top_p=0.9)] * 200
    given_tensors = (torch.from_numpy(logits), torch.arange(200), RowFilters.of(filters, CPU), torch.from_numpy(u))
    assert draw_rows(*given_tensors).tolist() == expected(logits, filters, u)
    assert draw_rows(given_tensors[0], torch.arange(0), RowFilters.of([], CPU), torch.zeros(0)).tolist() == []


def test_under_the_interpreter() -> None:
    run_under_the_interpreter(__file__)


@pytest.mark.gpu
@settings(deadline=None, max_examples=8, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), filters=st.lists(SOME, min_size=1, max_size=4), vocab=st.sampled_from([1, 5, 300]))
def test_triton_draws_what_the_host_draws(device: torch.device, seed: int, filters: list[Filters], vocab: int) -> None:
    from kernels import sampling_triton

    check(sampling_triton.draw_rows, device, seed, filters, vocab)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"top_p": 0.8}, {"top_k": 1500, "top_p": 0.95, "min_p": 0.001}])
def test_tritons_draw_from_several_blocks(device: torch.device, options: dict[str, Any]) -> None:
    from kernels import sampling_triton

    check(sampling_triton.draw_rows, device, 9, [Filters(temperature=1.1, **options)], 9000)
