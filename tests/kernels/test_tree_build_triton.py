"""The Triton tree builder against kernels.tree_build."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import tree_build
from kernels.tree_build import DraftTree, Expansion, expand_frontier, expand_root
from tests.kernels.interpreted import kernel_device, run_under_the_interpreter


@pytest.fixture(scope="module")
def device() -> torch.device:
    return kernel_device()


def test_under_the_interpreter() -> None:
    run_under_the_interpreter(__file__)


def random_expansions(seed: int, batch: int, topk: int, steps: int) -> list[Expansion]:
    """Falling probabilities of few values, so that many are equal; some 0, some 1, some NaN."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([0.0, 0.25, 0.5, 0.5, 1.0, torch.nan])

    def some(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = values[torch.randint(0, len(values), shape, generator=generator)]
        return drawn.sort(dim=-1, descending=True).values, torch.randint(0, 50, shape, generator=generator)

    expansions = [expand_root(*some(batch, topk))]
    for step in range(1, steps):
        expansions.append(expand_frontier(expansions[-1], *some(batch, topk, topk), step))
    return expansions


def assert_equal(found: DraftTree, wanted: DraftTree) -> None:
    for name, mine, theirs in zip(DraftTree._fields, found, wanted, strict=True):
        assert torch.equal(mine.cpu(), theirs), name


@pytest.mark.gpu
@settings(deadline=None, max_examples=12, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.floats(0, 1))
def test_trees(device: torch.device, seed: int, batch: int, topk: int, steps: int, share: float) -> None:
    from kernels.tree_build_triton import build_tree

    most = topk + (steps - 1) * topk**2
    num_nodes = 2 + round(share * (most - 1))
    expansions = random_expansions(seed, batch, topk, steps)
    roots = torch.arange(batch) + 7
    there = [Expansion(*(values.to(device) for values in expansion)) for expansion in expansions]
    found = build_tree(roots.to(device), there, num_nodes)
    assert_equal(found, tree_build.build_tree(roots, expansions, num_nodes))


@pytest.mark.gpu
def test_more_nodes_than_there_are_candidates(device: torch.device) -> None:
    from kernels.tree_build_triton import build_tree

    there = [Expansion(*(values.to(device) for values in each)) for each in random_expansions(1, 1, 2, 2)]
    one = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="at most 6 nodes"):
        build_tree(one, there, 8)
