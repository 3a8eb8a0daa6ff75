from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import InvalidArgument
from outrider.wire import check_token_ids, pack_ids, pack_scores, unpack_ids


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_ids_and_back(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids), field="tokens").tolist() == ids
    assert unpack_ids(pack_ids(np.array(ids, np.int64)), field="tokens").dtype == np.int32


def test_ids_are_little_endian() -> None:
    assert pack_ids([1, -2]) == b"\x01\x00\x00\x00\xfe\xff\xff\xff"


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_half_an_id_is_refused(length: int) -> None:
    with pytest.raises(InvalidArgument, match=f"tokens: {length} bytes") as refused:
        unpack_ids(bytes(length), field="tokens")
    assert refused.value.field == "tokens"


@pytest.mark.parametrize(("ids", "at"), [([0, 5, 9], 2), ([-1], 0), ([3, 2**31 - 1, -7], 1)])
def test_the_first_id_outside_the_vocabulary_is_named(ids: list[int], at: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"prompt\[{at}\] is {ids[at]}; token ids are from 0 to 8"):
        check_token_ids(np.array(ids, np.int32), vocab_size=9, field="prompt")


def test_ids_inside_the_vocabulary_pass() -> None:
    check_token_ids(np.array([0, 8], np.int32), vocab_size=9, field="prompt")
    check_token_ids(np.array([], np.int32), vocab_size=9, field="prompt")


@given(st.lists(st.floats(0, 1)))
def test_scores_follow_their_definition(probabilities: list[float]) -> None:
    expected = [min(255, round(-16 * math.log(p))) if p > 0 else 255 for p in probabilities]
    packed = list(pack_scores(np.array(probabilities)))
    assert all(abs(a - b) <= 1 for a, b in zip(packed, expected, strict=True))  # halves may round either way
    assert list(pack_scores(np.array([1.0, 0.0]))) == [0, 255]
