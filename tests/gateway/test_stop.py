"""Stop strings, whatever pieces the text comes in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.stop import StopMatcher


def reference(text: str, stops: list[str], num_free: int = 0) -> tuple[str, str | None]:
    """The rule, character by character: the first stop string to be complete ends the text; the longest of those.

    Within the first `num_free` characters none is.
    """
    for end in range(num_free + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: list[str], num_free: int = 0) -> tuple[str, str | None]:
    """What a matcher lets through; the first `num_free` pieces may not end it."""
    matcher = StopMatcher(stops)
    out = "".join(matcher.push(piece, may_end=index >= num_free) for index, piece in enumerate(pieces))
    return out + ("" if matcher.matched is not None else matcher.finish()), matcher.matched


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4, unique=True),
    st.integers(0, 12),
)
def test_equals_the_rule_for_every_way_of_cutting(pieces: list[str], stops: list[str], num_free: int) -> None:
    assert run(pieces, stops) == reference("".join(pieces), stops)
    assert run(pieces, stops, num_free) == reference("".join(pieces), stops, len("".join(pieces[:num_free])))


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_nothing_is_let_out_that_a_stop_string_could_take_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    out = ""
    for char in text:
        out += matcher.push(char)
        assert reference(text, stops)[0].startswith(out)


@pytest.mark.parametrize(
    ("pieces", "stops", "out", "matched"),
    [
        (["Hello wor", "ld"], ["world"], "Hello ", "world"),
        (["a", "b", "c"], ["abd"], "abc", None),
        (["abcd"], ["abcd", "bc"], "a", "bc"),
        (["xab"], ["b", "ab"], "x", "ab"),
        (["one END two END"], ["END"], "one ", "END"),
        (["né", "e"], ["ée"], "n", "ée"),
    ],
)
def test_examples(pieces: list[str], stops: list[str], out: str, matched: str | None) -> None:
    assert run(pieces, stops) == (out, matched)


def test_says_nothing_after_a_match() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("One. Two") == "One"
    assert matcher.push(" Three") == ""
    assert matcher.finish() == ""


def test_text_that_looks_like_a_beginning_comes_out_as_soon_as_it_is_none() -> None:
    matcher = StopMatcher(["</answer>"])
    assert matcher.push("x</ans") == "x"
    assert matcher.push("!") == "</ans!"
