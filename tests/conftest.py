"""Settings for all tests: property tests may take as long as a busy machine makes them; torch uses one thread.

Tests share the cores with one another's processes, where OpenMP's barriers cost more than a second thread brings.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from hypothesis import HealthCheck, settings

settings.register_profile("outrider", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("outrider")
