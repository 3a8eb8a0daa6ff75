from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import InvalidArgument
from outrider.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams
from outrider.v1 import common_pb2

VOCAB_SIZE = 100


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("stop_token_ids", tuple(range(MAX_STOP_TOKEN_IDS + 1))),
    ],
)
def test_out_of_range_is_refused_by_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        SamplingParams(**{field: value})
    assert refused.value.field == field


@pytest.mark.parametrize("bias", [{3: 101.0}, {3: math.nan}, dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0)])
def test_logit_bias_is_bounded(bias: dict[int, float]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        SamplingParams(logit_bias=bias)
    assert refused.value.field in {"logit_bias", "logit_bias[3]"}


@pytest.mark.parametrize("params", [{"stop_token_ids": (1, 100)}, {"logit_bias": {100: 1.0}}])
def test_ids_outside_the_vocabulary_are_refused(params: dict[str, Any]) -> None:
    SamplingParams(**params).check_vocab(101)
    with pytest.raises(InvalidArgument, match="token id 100 is not from 0 to 99"):
        SamplingParams.from_proto(SamplingParams(**params).to_proto(), vocab_size=VOCAB_SIZE)


def test_absent_on_the_wire_means_the_default() -> None:
    assert SamplingParams.from_proto(common_pb2.SamplingParams(), vocab_size=VOCAB_SIZE) == SamplingParams()


floats32 = st.floats(0.0, 1.0, width=32)


@given(
    st.builds(
        SamplingParams,
        temperature=floats32,
        top_k=st.integers(0, 2**31 - 1),
        top_p=st.floats(0.0, 1.0, width=32, exclude_min=True),
        min_p=floats32,
        seed=st.none() | st.integers(0, 2**64 - 1),
        max_tokens=st.none() | st.integers(1, 2**32 - 1),
        min_tokens=st.integers(0, 2**31 - 1),
        stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=MAX_STOP_TOKEN_IDS).map(tuple),
        ignore_eos=st.booleans(),
        presence_penalty=st.floats(-2.0, 2.0, width=32),
        repetition_penalty=st.floats(0.5, 2.0, width=32),
        logit_bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100, width=32), max_size=5),
    )
)
def test_over_the_wire_and_back(params: SamplingParams) -> None:
    assert SamplingParams.from_proto(params.to_proto(), vocab_size=VOCAB_SIZE) == params
