"""A short run of tests/e2e/chaos.py; `make chaos` has longer ones."""

from __future__ import annotations

import pytest

from tests.e2e.chaos import run
from tests.e2e.rogues import KINDS


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.timeout(600)
async def test_whatever_goes_wrong_no_answer_does() -> None:
    outcome = await run(20.0, seed=3)
    assert not outcome.wrong, "\n".join(outcome.wrong)
    assert not outcome.lost, "\n".join([*outcome.lost, *outcome.comings])
    assert outcome.pages_kept == []
    assert not outcome.complaints, "\n\n".join(outcome.complaints)
    assert outcome.answers > 0
    assert outcome.events
    assert outcome.enlisted == {*KINDS} - {"stranger"}
