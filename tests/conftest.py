"""Settings for all tests: property tests may take as long as a busy machine makes them."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("outrider", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("outrider")
