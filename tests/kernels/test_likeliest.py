"""The likeliest tokens of a row: C and torch agree, and equals come in the order of their ids."""

from __future__ import annotations

import math

import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from kernels.likeliest import Likeliest, likeliest, native_likeliest
from kernels.native.library import open_library
from outrider import env


@pytest.fixture(scope="module")
def native() -> Likeliest:
    return native_likeliest(open_library(env.home() / "kernels"))


def by_definition(logits: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens in float64, by sorting."""
    chances, ids = logits.double().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    return chances[:, :num_top].float(), ids[:, :num_top]


@pytest.mark.parametrize("width", [1, 15, 16, 63, 64, 65, 2047, 2048, 2049, 6000, 49152])
@pytest.mark.parametrize("num_top", [1, 4, 16])
def test_widths(native: Likeliest, width: int, num_top: int) -> None:
    logits = 4 * torch.randn(3, width, generator=torch.Generator().manual_seed(width))
    expected, expected_ids = by_definition(logits, num_top)
    for find in (native, likeliest):
        chances, ids = find(logits, num_top)
        torch.testing.assert_close(chances, expected, atol=1e-8, rtol=1e-5)
        assert torch.equal(ids, expected_ids)
        assert (chances.dtype, ids.dtype) == (torch.float32, torch.int64)


@settings(max_examples=200, deadline=None)
@given(
    logits=arrays.arrays(
        np.float32, st.tuples(st.integers(1, 3), st.integers(1, 200)),
        elements=st.integers(-3, 3) | st.floats(-80, 80, width=32) | st.just(-math.inf),
    ),
    num_top=st.integers(1, 20),
)  # fmt: skip
def test_equals_come_in_the_order_of_their_ids(native: Likeliest, logits: np.ndarray, num_top: int) -> None:
    rows = torch.from_numpy(logits)
    chances, ids = native(rows, num_top)
    # By the logits: what is far below the highest is as likely as -inf.
    order = rows.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    assert torch.equal(ids, order)
    expected = rows.double().softmax(dim=-1).gather(1, order).float()
    torch.testing.assert_close(chances, expected, atol=1e-30, rtol=2e-5, equal_nan=True)


def test_rows_of_a_wider_array(native: Likeliest) -> None:
    wide = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    for part in (wide[:, :257], wide[1:4, 3:], wide.T[:40]):
        for mine, theirs in zip(native(part, 7), likeliest(part, 7), strict=True):
            torch.testing.assert_close(mine, theirs)


def test_half_precision_is_widened_first(native: Likeliest) -> None:
    rows = torch.randn(2, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    for find in (native, likeliest):
        for part in (rows, rows.T[:20]):
            for mine, theirs in zip(find(part, 1), find(part.float(), 1), strict=True):
                assert torch.equal(mine, theirs)


def test_no_rows(native: Likeliest) -> None:
    assert [found.shape for found in native(torch.empty(0, 9), 4)] == [(0, 4), (0, 4)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_has_no_softmax_has_no_probabilities(native: Likeliest, bad: float) -> None:
    row = torch.zeros(2, 5000)
    row[0, 3000] = bad
    row[1] = -math.inf
    chances, ids = native(row, 4)
    assert chances.isnan().all()
    assert ((ids >= 0) & (ids < 5000)).all()
    row[1, 4999] = 1.0  # a whole block of nothing before it
    chances, ids = native(row[1:], 2)
    assert chances.tolist() == [[1.0, 0.0]]
    assert ids.tolist() == [[4999, 0]]
