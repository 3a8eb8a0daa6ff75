"""What the C kernels' registers compute, beside numpy in double precision and torch's fp8."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from kernels.attention.pool import FP8
from kernels.native import build

SOURCE = """
#include "fp8.h"
void outrider_power(const float *x, float *y, int count) {
    for (int i = 0; i < count; i += LANES) store(y + i, power(load(x + i)));
}
#define BOTH_WAYS(kept) \\
    void outrider_load_##kept(const uint8_t *x, float *y, int count) { \\
        for (int i = 0; i < count; i += LANES) store(y + i, load_fp8(kept, x + i)); \\
    } \\
    void outrider_store_##kept(const float *x, uint8_t *y, int count) { \\
        for (int i = 0; i < count; i += LANES) store_fp8(kept, y + i, load(x + i)); \\
    }
BOTH_WAYS(E4M3)
BOTH_WAYS(E5M2)
"""


@pytest.fixture(scope="module")
def registers(library: ctypes.CDLL, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    del library  # skips where there is no compiler
    source = tmp_path_factory.mktemp("registers") / "registers.c"
    source.write_text(SOURCE)
    return build.load_library(source.parent, (source,))


def run(function: ctypes._NamedFuncPointer, x: np.ndarray, dtype: type) -> np.ndarray:
    """The function of all numbers."""
    padded = np.concatenate([x, np.zeros(-len(x) % 16, x.dtype)])
    y = np.empty(len(padded), dtype)
    function(padded.ctypes.data_as(ctypes.c_void_p), y.ctypes.data_as(ctypes.c_void_p), len(padded))
    return y[: len(x)]


def test_power_is_right_to_about_an_ulp_and_exact_where_it_matters(registers: ctypes.CDLL) -> None:
    """Weights of attention: none above 1, the highest score's exactly 1, masked ones exactly 0, NaN stays."""
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [-(2.0 ** rng.uniform(-30, 7, 100_000)), np.arange(-130, 1), [0.0, -np.inf, -126.5, -1e30, np.nan]]
    ).astype(np.float32)
    y = run(registers.outrider_power, x, np.float32)
    seen = x >= -126
    exact = np.exp2(x[seen].astype(np.float64))
    assert np.abs(y[seen] / exact - 1).max() < 1.5 * 2.0**-23
    assert y[seen].max() == 1.0
    assert (y[x == 0] == 1.0).all()
    assert (y[x < -126] == 0.0).all()
    assert np.isnan(y[np.isnan(x)]).all()


@pytest.mark.parametrize(("kept", "dtype"), [("E4M3", FP8["fp8_e4m3"]), ("E5M2", FP8["fp8_e5m2"])])
def test_fp8_is_read_and_written_as_torch_does(registers: ctypes.CDLL, kept: str, dtype: torch.dtype) -> None:
    codes = np.arange(256, dtype=np.uint8)
    numbers = torch.from_numpy(codes).view(dtype).float().numpy()
    loaded = run(registers[f"outrider_load_{kept}"], codes, np.float32)
    np.testing.assert_array_equal(loaded, numbers)
    # Every number, all that lie halfway between two, what lies beside those, and what is out of range.
    finite = np.sort(numbers[np.isfinite(numbers)])
    halves = (finite[1:] + finite[:-1]) / 2
    beside = [np.nextafter(halves, np.float32(to)) for to in (-np.inf, np.inf)]
    rng = np.random.default_rng(1)
    wild = (2.0 ** rng.uniform(-40, 40, 50_000) * rng.choice([-1, 1], 50_000)).astype(np.float32)
    x = np.concatenate([finite, halves, *beside, wild, np.array([np.inf, -np.inf, 1e-45, -1e-45, -0.0], np.float32)])
    largest = torch.finfo(dtype).max
    wanted = torch.from_numpy(x).clamp(-largest, largest).to(dtype).view(torch.uint8).numpy()
    store = registers[f"outrider_store_{kept}"]
    np.testing.assert_array_equal(run(store, x, np.uint8), wanted)
    nothing = run(store, np.array([np.nan, -np.nan], np.float32), np.uint8)
    assert torch.from_numpy(nothing).view(dtype).isnan().all()
