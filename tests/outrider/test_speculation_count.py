"""Counts of speculation: of steps, added up, over the wire."""

from __future__ import annotations

from outrider.speculation_count import SpeculationCount, total_speculation


def test_steps_are_counted_added_and_told() -> None:
    one, other = SpeculationCount(accepted_prediction_tokens=5, rejected_prediction_tokens=1), SpeculationCount()
    one.count(drafted=4, accepted=2, committed=3)
    one.count(drafted=0, accepted=0, committed=1)
    other.count(drafted=4, accepted=1, committed=2)
    whole = total_speculation([one, other])
    assert whole == SpeculationCount(3, 2, 8, 3, 6, 5, 1, accepted_histogram=[1, 1, 1])
    assert whole.accept_length == 2.0
    told = whole.to_proto()
    assert len(told.ListFields()) == len(told.DESCRIPTOR.fields)
    whole.drafts = 0  # not told
    assert SpeculationCount.from_wire(told) == whole


def test_a_service_that_runs_for_months_is_counted() -> None:
    count = SpeculationCount(verify_steps=2**33, accepted_histogram=[2**33])
    assert SpeculationCount.from_wire(count.to_proto()) == count


def test_nothing_has_no_accept_length() -> None:
    assert SpeculationCount().accept_length is None
