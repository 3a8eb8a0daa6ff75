"""Settings for all tests: property tests may take as long as a busy machine makes them; torch uses one thread.

Tests share the cores with one another's processes, where OpenMP's barriers cost more than a second thread brings. What
numba compiles is kept in one place, since compiling it in the middle of a test takes a minute.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path

# Before torch and numba are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parent.parent / ".cache" / "tests" / "numba"))

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import HealthCheck, settings

import outrider as outrider  # before gRPC is imported

# A run says something of the change in hand only where two runs try the same examples. New ones: make search.
PLAIN = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("search", PLAIN)
settings.register_profile("outrider", PLAIN, derandomize=True)
settings.load_profile("outrider")
# A machine that stalls may take longer than httpx's five seconds.
DEFAULT_TIMEOUT_CONFIG.connect = DEFAULT_TIMEOUT_CONFIG.read = DEFAULT_TIMEOUT_CONFIG.write = 60.0


@pytest.fixture
def hangups() -> Generator[None]:
    """Sees to it that SIGHUP is not ignored, as it is under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
