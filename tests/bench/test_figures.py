from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench._figures import TABLE_HEAD, Spread, figures, percentile, spread_ms, table_row
from bench._load import Load, Run, poisson_moments
from bench._prompts import Prompt
from bench._stream import Answer

PROMPT = Prompt("1", "writing")


def answer(
    *chunk_times: float, tokens: int, ended: float, sent: float = 0.0, prompt: int = 100, steps: int | None = None
) -> Answer:
    return Answer(PROMPT, sent, chunk_times, ended, prompt, tokens, "length", steps)


def test_tokens_of_one_event_came_at_once() -> None:
    one = answer(0.5, 0.7, 1.1, tokens=6, ended=1.1)
    assert one.ttft_s == 0.5
    assert one.gaps_s == pytest.approx([0.2, 0.4])
    assert one.inter_token_s == pytest.approx([0.2, 0.4, 0.0, 0.0, 0.0])


def test_an_answer_without_text_ends_with_its_first_token() -> None:
    silent = answer(tokens=1, ended=0.25)
    assert (silent.ttft_s, silent.decode_s, silent.inter_token_s) == (0.25, 0.0, [])


def test_figures_of_a_run() -> None:
    quick = answer(0.5, 1.0, 1.5, tokens=11, ended=1.5, steps=5)
    slow = answer(1.0, 2.0, 3.0, tokens=21, ended=3.0, prompt=300, steps=5)
    row = figures(Run(Load(2), (quick, slow), 4.0))
    assert (row.concurrency, row.num_requests, row.prompt_tokens, row.completion_tokens) == (2, 2, 400, 32)
    assert row.ttft_ms == Spread(750.0, 500.0, 1000.0)
    assert row.prefill_tokens_per_s == 250.0  # the median of 200 and 300
    assert row.total_prefill_tokens_per_s == 100.0
    assert row.decode_tokens_per_s == 10.0  # 30 tokens after the first, in 1 + 2 seconds
    assert row.decode_tokens_per_s_p50 == 10.0
    assert row.total_tokens_per_s == 8.0
    assert row.accept_length == 3.0
    assert row.inter_chunk_ms == Spread(750.0, 500.0, 1000.0)


def test_prefill_alone_has_no_decode_figures() -> None:
    row = figures(Run(Load(1), (answer(0.5, tokens=1, ended=0.5),), 0.5))
    assert (row.decode_tokens_per_s, row.inter_token_ms, row.accept_length) == (None, None, None)
    assert row.prefill_tokens_per_s == 200.0


def test_accept_length_of_the_server_where_answers_tell_none() -> None:
    run = Run(Load(1), (answer(0.5, 1.0, tokens=2, ended=1.0),), 1.0)
    assert figures(run, server_accept_length=1.5).accept_length == 1.5
    told = answer(0.5, tokens=1, ended=0.5, steps=0)  # none was needed
    assert figures(Run(Load(1), (told,), 0.5), server_accept_length=1.5).accept_length is None


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles_are_values_with_enough_below(values: list[float]) -> None:
    ordered = sorted(values)
    for percent in (1, 50, 99, 100):
        value = percentile(ordered, percent)
        assert sum(other <= value for other in ordered) * 100 >= percent * len(ordered)
        assert sum(other < value for other in ordered) * 100 < percent * len(ordered)


def test_nothing_has_no_spread() -> None:
    assert spread_ms([]) is None


def test_table_has_a_line_for_each_load() -> None:
    one = figures(Run(Load(1), (answer(0.5, tokens=1, ended=0.5),), 0.5))
    rated = figures(Run(Load(request_rate=2.5), (answer(0.5, 1.0, tokens=3, ended=1.0, steps=1),), 1.0))
    assert table_row(one).startswith("| 1 at once | 1 | 500.0 / 500.0 |  | 200.0 |  |")
    assert table_row(rated).startswith("| 2.5/s | 1 |")
    assert table_row(rated).endswith("| 4.0 | 3.0 | 2.00 |")
    assert TABLE_HEAD.count("|") == 2 * table_row(one).count("|")


def test_moments_of_sending_are_at_the_rate() -> None:
    moments = poisson_moments(2001, 10.0, seed=1)
    assert moments[0] == 0.0
    assert moments == sorted(moments)
    assert moments[-1] / 2000 == pytest.approx(0.1, rel=0.1)
