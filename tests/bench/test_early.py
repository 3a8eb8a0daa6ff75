"""Early and fresh trees, from two scrapes of verify's metrics."""

from __future__ import annotations

from bench.early import found
from outrider.scrape import parse

ZERO = """
outrider_overlap_total{algorithm="EAGLE3",result="hit"} %d
outrider_overlap_total{algorithm="EAGLE3",result="miss"} %d
outrider_overlap_accepted_tokens_total{algorithm="EAGLE3",result="hit"} %d
outrider_overlap_accepted_tokens_total{algorithm="EAGLE3",result="miss"} %d
"""


def test_accept_lengths_count_the_bonus_and_what_came_between_the_scrapes() -> None:
    row = found("EAGLE3", parse(ZERO % (10, 10, 99, 5), 0.0), parse(ZERO % (40, 20, 129, 25), 1.0))
    assert (row.hit_rate, row.early, row.fresh, row.trees) == (0.75, 2.0, 3.0, 40)


def test_without_early_trees_nothing_is_said_of_them() -> None:
    row = found("NGRAM", parse(ZERO % (0, 0, 0, 0), 0.0), parse(ZERO % (0, 4, 0, 4), 1.0))
    assert (row.hit_rate, row.early, row.fresh, row.trees) == (0.0, None, 2.0, 4)
