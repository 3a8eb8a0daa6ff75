"""The Triton kernels of drafting: the likeliest tokens as float64 has them; trees and pairs of norms as torch does."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.likeliest import likeliest as on_any_device
from kernels.paired_norms import paired_norms
from kernels.tree_growth import GrowingTrees, grow_on_torch
from tests.kernels.interpreted import run_under_the_interpreter


def test_under_the_interpreter() -> None:
    run_under_the_interpreter(__file__)


def assert_likeliest(logits: torch.Tensor, num_top: int) -> None:
    """The first of equals comes first; NaN is the highest, and makes a row's probabilities NaN, as inf does."""
    from kernels.likeliest_triton import likeliest

    chances, ids = (found.cpu() for found in likeliest(logits, num_top))
    wide = logits.cpu().double()
    order = wide.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    assert torch.equal(ids, order)
    torch.testing.assert_close(chances, wide.softmax(-1).gather(1, order).float(), rtol=2e-5, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("width", "num_top"), [(1, 1), (7, 16), (2047, 4), (2048, 1), (2049, 16), (6001, 4)])
def test_widths(device: torch.device, width: int, num_top: int, dtype: torch.dtype) -> None:
    """Half precision has many equals."""
    logits = 4 * torch.randn(2, width, generator=torch.Generator().manual_seed(width))
    assert_likeliest(logits.to(device, dtype), num_top)


@pytest.mark.gpu
def test_equals_come_in_the_order_of_their_ids(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.tensor([-math.inf, -80.0, -1.5, -0.0, 0.0, 3.0])
    for width in (5, 40, 4100):
        logits = values[torch.randint(0, len(values), (3, width), generator=generator)]
        logits[2] = -math.inf
        logits[2, width // 2] = 1.0  # alone, with whole blocks of nothing around it
        assert_likeliest(logits.to(device), 9)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, by which the interpreter computes
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_what_has_no_softmax_has_no_probabilities(device: torch.device, bad: float) -> None:
    logits = torch.zeros(3, 4100)
    logits[0, 3000] = bad
    logits[1] = -math.inf
    logits[2, 4099] = 1.0
    assert_likeliest(logits.to(device), 4)


@pytest.mark.gpu
def test_bits_do_not_depend_on_the_rows_beside_nor_on_how_many_are_wanted(device: torch.device) -> None:
    from kernels.likeliest_triton import likeliest

    logits = (4 * torch.randn(3, 4500, generator=torch.Generator().manual_seed(2))).to(device)
    together = likeliest(logits, 16)
    for row in range(len(logits)):
        for num_top in (1, 4):
            for mine, theirs in zip(likeliest(logits[row : row + 1], num_top), together, strict=True):
                assert torch.equal(mine[0], theirs[row, :num_top])


@pytest.mark.gpu
def test_rows_of_a_wider_array(device: torch.device) -> None:
    wide = torch.randn(4, 300, generator=torch.Generator().manual_seed(1)).to(device)
    for part in (wide[:, :257], wide[1:3, 3:], wide.T[:3], wide[:0]):
        assert_likeliest(part, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_cuda_device_they_serve() -> None:
    from kernels.likeliest_triton import likeliest

    logits = torch.randn(3, 5000, device="cuda")
    for mine, theirs in zip(on_any_device(logits, 4), likeliest(logits, 4), strict=True):
        assert torch.equal(mine, theirs)
    assert on_any_device(torch.randn(1, 5000, device="cuda"), 5000)[0].shape == (1, 5000)  # more than they take


def some_trees(batch: int, num_steps: int, topk: int, hidden: int, device: torch.device) -> GrowingTrees:
    """Places where something lies already."""
    trees = GrowingTrees.places(batch, num_steps, topk, hidden, torch.float32, device)
    for places in (trees.tokens, trees.bits, trees.inputs, trees.states, trees.found, trees.reach):
        places.fill_(-1)
    return trees


@pytest.mark.gpu
@pytest.mark.parametrize("has_names", [False, True])
@pytest.mark.parametrize(
    ("batch", "num_steps", "topk", "hidden"), [(3, 4, 3, 40), (1, 2, 1, 16), (2, 5, 4, 100), (1, 10, 8, 33)]
)
def test_trees_grow_alike(
    device: torch.device, batch: int, num_steps: int, topk: int, hidden: int, has_names: bool
) -> None:
    """Chances have few values, so that many are equal; some 0, some 1, some NaN; more entries than a word has bits."""
    from kernels.tree_growth_triton import grow_on

    generator = torch.Generator().manual_seed(topk)
    values = torch.tensor([0.0, 0.25, 0.5, 0.5, 1.0, math.nan])
    names = 1000 + torch.randperm(50, generator=generator) if has_names else None
    mine = some_trees(batch, num_steps, topk, hidden, device)
    theirs = some_trees(batch, num_steps, topk, hidden, torch.device("cpu"))
    for step in range(num_steps):
        num_rows = batch * (topk if step else 1)
        drawn = values[torch.randint(0, len(values), (num_rows, topk), generator=generator)]
        chances = drawn.sort(dim=-1, descending=True).values
        ids = torch.randint(0, 50, (num_rows, topk), generator=generator)
        states = torch.randn((num_rows, hidden), generator=generator)
        given = chances, ids, states, names
        grow_on(mine, step, *(None if each is None else each.to(device) for each in given))  # type: ignore[arg-type]
        grow_on_torch(theirs, step, *given)
        for name in ("tokens", "bits", "inputs", "states", "found", "reach"):
            assert torch.equal(getattr(mine, name).cpu(), getattr(theirs, name)), (step, name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [16, 100, 576])
def test_norms_side_by_side(device: torch.device, width: int, dtype: torch.dtype) -> None:
    """States may be rows of a wider array."""
    from kernels.paired_norms_triton import paired_norms as in_triton

    generator = torch.Generator().manual_seed(width)
    rows = [torch.randn(shape, generator=generator).to(dtype) for shape in ((50, width), (3, 2 * width), (2, width))]
    given = rows[0], torch.tensor([49, 0, 7]), rows[1][:, width:], rows[2][0], rows[2][1]
    embedding, tokens, states, *norms = (each.to(device) for each in given)
    found = in_triton(embedding, tokens, states, norms[0], norms[1], 1e-5)
    close = 2e-6 if dtype is torch.float32 else 2e-3
    torch.testing.assert_close(found.cpu(), paired_norms(*given, 1e-5), atol=0, rtol=close)
    nothing = in_triton(embedding, tokens[:0], states[:0], norms[0], norms[1], 1e-5)
    assert nothing.shape == (0, 2 * width)
