"""What the C kernels' registers compute, beside numpy in double precision."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from kernels.native import build

SOURCE = """
#include "simd.h"
void outrider_power(const float *x, float *y, int count) {
    for (int i = 0; i < count; i += LANES) store(y + i, power(load(x + i)));
}
"""


@pytest.mark.usefixtures("library")  # skips where there is no compiler
def test_power_is_right_to_about_an_ulp_and_exact_where_it_matters(tmp_path: Path) -> None:
    """Weights of attention: none above 1, the highest score's exactly 1, masked ones exactly 0, NaN stays."""
    source = tmp_path / "power.c"
    source.write_text(SOURCE)
    power = build.load_library(tmp_path, (source,)).outrider_power
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [-(2.0 ** rng.uniform(-30, 7, 100_000)), np.arange(-130, 1), [0.0, -np.inf, -126.5, -1e30, np.nan]]
    ).astype(np.float32)
    x = np.concatenate([x, np.zeros(-len(x) % 16, np.float32)])
    y = np.empty_like(x)
    power(x.ctypes.data_as(ctypes.c_void_p), y.ctypes.data_as(ctypes.c_void_p), len(x))
    seen = x >= -126
    exact = np.exp2(x[seen].astype(np.float64))
    assert np.abs(y[seen] / exact - 1).max() < 1.5 * 2.0**-23
    assert y[seen].max() == 1.0
    assert (y[x == 0] == 1.0).all()
    assert (y[x < -126] == 0.0).all()
    assert np.isnan(y[np.isnan(x)]).all()
