"""Speculation's gain beside its theory, from what both services counted."""

from __future__ import annotations

import pytest

from bench.mt_bench import Said
from bench.theory import Side, gain_of
from outrider.scrape import Span, parse

VERIFY = """
outrider_step_seconds_count{kind="decode"} %d
outrider_step_seconds_sum{kind="decode"} %f
outrider_spec_committed_tokens_total{algorithm="EAGLE3"} %d
"""
DRAFT = """
outrider_draft_seconds_count{algorithm="EAGLE3",kind="fresh"} %d
outrider_draft_seconds_sum{algorithm="EAGLE3",kind="fresh"} %f
"""


def test_the_share_is_the_gain_of_what_step_times_promise() -> None:
    plain, speculative = Side(), Side()
    nothing = Span(parse(VERIFY % (5, 1.0, 5), 0.0), parse(VERIFY % (105, 1.5, 105), 1.0))
    no_drafts = Span(parse(DRAFT % (1, 1.0), 0.0), parse(DRAFT % (1, 1.0), 1.0))
    plain.add(Said("", 101, 0.5), nothing, no_drafts)
    steps = Span(parse(VERIFY % (0, 0.0, 0), 0.0), parse(VERIFY % (50, 0.3, 100), 1.0))
    drafts = Span(parse(DRAFT % (0, 0.0), 0.0), parse(DRAFT % (50, 0.1), 1.0))
    speculative.add(Said("", 101, 0.45), steps, drafts)
    found = gain_of(plain, speculative)
    assert (found.plain_ms, found.verify_ms, found.draft_ms) == pytest.approx((5.0, 6.0, 2.0))
    assert (found.accept_length, found.theory) == pytest.approx((2.0, 1.25))
    assert found.gain == pytest.approx(0.5 / 0.45)
    assert found.share == pytest.approx(found.gain / 1.25)
