"""Verdicts that wait to be applied, as a drafter at work sees them."""

from __future__ import annotations

import numpy as np
import pytest

from draft_service.news import News
from outrider.v1 import verify_pb2 as pb
from tests.draft_service.model_rig import session


def told(base_len: int, *tokens: int, number: int = 1) -> pb.Round:
    return pb.Round(verdicts=[pb.Verdict(session=number, generation=1, base_len=base_len, tokens=tokens)])


@pytest.mark.parametrize(("assumed", "left"), [
    ([4, 5, 6], False),  # just what is committed
    ([4, 5], False),  # on the way to it
    ([], False),
    ([4, 7], True),
    ([4, 5, 6, 7], True),  # may come true in a later step; the next one starts without it
])  # fmt: skip
def test_a_verdict_leaves_what_it_does_not_commit(assumed: list[int], left: bool) -> None:
    news, opened = News(), session([1, 2, 3])
    assert not news.leaves(opened, np.array(assumed, np.int32))
    news.note(told(3, 4, 5, 6))
    assert news.leaves(opened, np.array(assumed, np.int32)) is left


def test_rounds_are_news_until_they_are_taken() -> None:
    news, opened, other = News(), session([1, 2, 3]), np.array([9], np.int32)
    first, second = told(3, 4), told(4, 5)
    news.note(first)
    news.note(told(3, 9, number=2))
    news.note(second)
    assert not news.leaves(opened, np.array([4, 5], np.int32))
    assert news.leaves(opened, other)
    news.taken([first])
    opened.commit(np.array([4], np.int32))
    assert not news.leaves(opened, np.array([5], np.int32))
    news.taken([second])
    assert not news.leaves(opened, other)
