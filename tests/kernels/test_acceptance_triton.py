"""The Triton walks against kernels.acceptance, one session at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import acceptance
from kernels.acceptance import Accepted, AcceptedBatch, accept_thresholds
from tests.kernels.interpreted import run_under_the_interpreter
from tests.kernels.test_acceptance import accept_coupled

VOCAB = 5
FEW = settings(deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def test_under_the_interpreter() -> None:
    run_under_the_interpreter(__file__)


@dataclass
class Trees:
    """B trees in fixed shapes; what stands in unused places must not matter."""

    lists: list[tuple[list[int], list[int]]]
    parents: torch.Tensor
    tokens: torch.Tensor
    num_nodes: torch.Tensor

    @property
    def width(self) -> int:
        return self.tokens.shape[1]


def random_trees(rng: np.random.Generator, *, most: int, spare: int) -> Trees:
    lists = []
    for _ in range(int(rng.integers(1, 5))):
        parents: list[int] = []
        tokens: list[int] = []
        for _ in range(int(rng.integers(0, most + 1))):
            parent, token = int(rng.integers(-1, len(parents))), int(rng.integers(VOCAB))
            if (parent, token) not in zip(parents, tokens, strict=True):
                parents.append(parent)
                tokens.append(token)
        lists.append((parents, tokens))
    width = max(len(tokens) for _, tokens in lists) + spare
    shape = (len(lists), width)
    padded_parents = [parents + [-1] * (width - len(parents)) for parents, _ in lists]
    padded_tokens = [tokens + [3] * (width - len(tokens)) for _, tokens in lists]
    return Trees(
        lists,
        torch.tensor(padded_parents, dtype=torch.int32).reshape(shape),
        torch.tensor(padded_tokens, dtype=torch.int32).reshape(shape),
        torch.tensor([len(tokens) for _, tokens in lists]),
    )


def assert_session(batch: AcceptedBatch, index: int, alone: Accepted) -> None:
    width = batch.nodes.shape[1]
    assert batch.nodes[index].tolist() == alone.nodes + [-1] * (width - len(alone.nodes))
    assert (int(batch.num_accepted[index]), int(batch.bonus[index])) == (len(alone.nodes), alone.bonus)


@pytest.mark.gpu
@FEW
@given(seed=st.integers(0, 2**31), most=st.sampled_from([0, 4, 12, 40]), spare=st.integers(0, 3))
def test_coupled(device: torch.device, seed: int, most: int, spare: int) -> None:
    from kernels.acceptance_triton import accept_coupled_batch

    rng = np.random.default_rng(seed)
    trees = random_trees(rng, most=most, spare=spare)
    # Two tokens often, so that walks are long; -1: no distribution.
    drawn = torch.from_numpy(rng.choice([-1, 0, 1, 2, 3, 4], (len(trees.lists), trees.width + 1)))
    arguments = [tensor.to(device) for tensor in (trees.parents, trees.tokens, trees.num_nodes, drawn)]
    batch = accept_coupled_batch(*arguments)
    for index, (parents, tokens) in enumerate(trees.lists):
        assert_session(batch, index, accept_coupled(parents, tokens, drawn[index, : len(tokens) + 1].tolist()))


@pytest.mark.gpu
@FEW
@given(seed=st.integers(0, 2**31), most=st.sampled_from([0, 4, 20]), spare=st.integers(0, 2), greedy=st.booleans())
def test_thresholds(device: torch.device, seed: int, most: int, spare: int, greedy: bool) -> None:
    from kernels.acceptance_triton import accept_thresholds_batch

    check_thresholds(accept_thresholds_batch, device, seed, most, spare, greedy)


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), most=st.sampled_from([0, 4, 20]), spare=st.integers(0, 2), greedy=st.booleans())
def test_thresholds_in_torch(seed: int, most: int, spare: int, greedy: bool) -> None:
    check_thresholds(acceptance.accept_thresholds_batch, torch.device("cpu"), seed, most, spare, greedy)


def check_thresholds(
    accept: Callable[..., AcceptedBatch], device: torch.device, seed: int, most: int, spare: int, greedy: bool
) -> None:
    rng = np.random.default_rng(seed)
    trees = random_trees(rng, most=most, spare=spare)
    batch_size, rows = len(trees.lists), trees.width + 1
    probs = random_distributions(rng, (batch_size, rows), greedy)
    coins, finals = (torch.from_numpy(rng.random((batch_size, rows))) for _ in range(2))
    singles = torch.from_numpy(rng.choice([0.0, 0.3, 0.8, 1.0], batch_size))
    accs = torch.from_numpy(rng.choice([0.0, 0.4, 0.9, 1.0], batch_size))
    given_tensors = (trees.parents, trees.tokens, trees.num_nodes, probs, coins, finals, singles, accs)
    batch = accept(*[tensor.to(device) for tensor in given_tensors])
    for index in range(batch_size):
        assert_session(
            batch, index, alone(trees, index, probs, coins, finals, float(singles[index]), float(accs[index]))
        )


def alone(
    trees: Trees, index: int, probs: torch.Tensor, coins: torch.Tensor, finals: torch.Tensor, single: float, acc: float
) -> Accepted:
    def distribution(row: int) -> np.ndarray | None:
        here = probs[index, row].numpy()
        return here if here.any() else None

    return accept_thresholds(
        *trees.lists[index], distribution, coins[index].tolist().__getitem__, finals[index].tolist().__getitem__,
        threshold_single=single, threshold_acc=acc,
    )  # fmt: skip


def random_distributions(rng: np.random.Generator, shape: tuple[int, int], greedy: bool) -> torch.Tensor:
    """fp64 [*shape, VOCAB]: some tokens impossible, and some rows without a distribution."""
    probs = rng.dirichlet(np.full(VOCAB, 0.6), size=shape)
    probs[rng.random(probs.shape) < 0.2] = 0.0
    if greedy:
        probs = (probs == probs.max(axis=-1, keepdims=True)).astype(np.float64)
    probs[rng.random(shape) < 0.1] = 0.0
    totals = probs.sum(axis=-1, keepdims=True)
    return torch.from_numpy(probs / np.where(totals > 0.0, totals, 1.0))


@pytest.mark.gpu
@pytest.mark.parametrize("u", [0.0, 0.25, 0.5, 0.999999])
def test_the_bonus_is_drawn_over_a_whole_vocabulary(device: torch.device, u: float) -> None:
    from kernels.acceptance_triton import accept_thresholds_batch

    vocab = 5000  # several blocks, the last one not full
    weights = np.zeros(vocab)
    places = [3, 1023, 1024, 2500, 4999]
    weights[places] = [1, 2, 1, 2, 2]
    probs = torch.from_numpy(np.stack([weights / weights.sum(), weights * 0.0])[None])
    tokens = torch.tensor([[1024]])
    half, one = torch.full((1, 2), u, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    given_tensors = (torch.tensor([[-1]]), tokens, torch.tensor([1]), probs, half * 0 + 0.9, half, one, one)
    batch = accept_thresholds_batch(*[tensor.to(device) for tensor in given_tensors])
    # 1024 is refused at 0.9; what is left are 1, 2, 2 and 2 of 7.
    left = [3, 1023, 2500, 4999]
    wanted = left[int(np.searchsorted(np.cumsum([1, 2, 2, 2]), u * 7, side="right"))]
    assert (batch.nodes.tolist(), batch.num_accepted.tolist(), batch.bonus.tolist()) == ([[-1]], [0], [wanted])


@pytest.mark.gpu
def test_rounding_that_rejects_everything_leaves_the_whole_distribution(device: torch.device) -> None:
    from kernels.acceptance_triton import accept_thresholds_batch

    probs = torch.zeros((1, 3, VOCAB), dtype=torch.float64)
    probs[0, 0, :2] = torch.tensor([0.5, 0.5 - 2**-52], dtype=torch.float64)
    coins = torch.full((1, 3), 1 - 2**-53, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    given_tensors = (
        torch.tensor([[-1, -1]]), torch.tensor([[0, 1]]), torch.tensor([2]), probs, coins, coins * 0.9, one, one,
    )  # fmt: skip
    batch = accept_thresholds_batch(*[tensor.to(device) for tensor in given_tensors])
    in_torch = acceptance.accept_thresholds_batch(*given_tensors)
    for each in (batch, in_torch):
        assert (each.num_accepted.tolist(), each.bonus.tolist()) == ([0], [1])
