from __future__ import annotations

from bench._figures import Figures, Spread
from bench._ratios import Measured, medians, ratio_table, ratios, speed_table
from bench._systems import parse_entries

ENTRIES = parse_entries("outrider,outrider-ngram,llama.cpp,llama.cpp-q8@1,outrider-int8@1", [1, 8])


def row(streams: int, speed: float, prefill: float = 0.0) -> Figures:
    return Figures(
        concurrency=streams, request_rate=None, num_requests=8, duration_s=1.0, prompt_tokens=1, completion_tokens=1,
        ttft_ms=Spread(speed, speed, speed), inter_token_ms=None, inter_chunk_ms=None, prefill_tokens_per_s=None,
        total_prefill_tokens_per_s=prefill, decode_tokens_per_s=speed, decode_tokens_per_s_p50=speed,
        total_tokens_per_s=speed * streams / 2, accept_length=None,
    )  # fmt: skip


def measured(speed: float, *streams: int) -> Measured:
    return Measured([row(number, speed) for number in streams], [row(number, 0.0, speed * 10) for number in streams])


ROUNDS = [
    {
        "outrider": measured(100 * pace, 1, 8), "outrider-ngram": measured(150 * pace * luck, 1, 8),
        "llama.cpp": measured(50 * pace, 1, 8), "llama.cpp-q8": measured(80 * pace, 1),
        "outrider-int8": measured(120 * pace, 1),
    }
    for pace, luck in ((1.0, 1.0), (0.5, 2.0), (0.1, 0.9))
]  # fmt: skip


def test_two_processes_are_compared_with_one() -> None:
    entries = parse_entries("outrider-ngram,outrider-ngram-colocated", [1])
    rounds = [{"outrider-ngram": measured(96, 1), "outrider-ngram-colocated": measured(100, 1)}]
    (found,) = [one for one in ratios(entries, rounds) if one.figure == "decode"]
    assert (found.system, found.beside, found.median) == ("outrider-ngram", "outrider-ngram-colocated", 0.96)


def test_two_of_a_kind_are_compared() -> None:
    entries = parse_entries("outrider,outrider#2,outrider-ngram", [1])
    rounds = [{"outrider": measured(50, 1), "outrider#2": measured(45, 1), "outrider-ngram": measured(100, 1)}]
    found = {(one.system, one.beside): one.median for one in ratios(entries, rounds) if one.figure == "decode"}
    assert found == {("outrider#2", "outrider"): 0.9, ("outrider-ngram", "outrider"): 2.0}


def test_a_slow_moment_of_the_machine_moves_no_ratio() -> None:
    found = {(one.system, one.beside, one.figure, one.streams): one for one in ratios(ENTRIES, ROUNDS)}
    plain = found["outrider", "llama.cpp", "decode", 1]
    assert (plain.median, plain.least, plain.most) == (2.0, 2.0, 2.0)
    ngram = found["outrider-ngram", "outrider", "decode", 8]
    assert (ngram.median, ngram.least, ngram.most) == (1.5, 1.35, 3.0)
    assert found["outrider", "llama.cpp", "prefill", 8].median == 2.0


def test_only_the_same_precision_is_compared() -> None:
    pairs = {(one.system, one.beside) for one in ratios(ENTRIES, ROUNDS)}
    assert pairs == {
        ("outrider", "llama.cpp"), ("outrider-ngram", "llama.cpp"), ("outrider-ngram", "outrider"),
        ("outrider-int8", "llama.cpp-q8"),
    }  # fmt: skip


def test_rounds_in_which_one_failed_do_not_count() -> None:
    missing = [{name: one for name, one in ROUNDS[0].items() if name != "llama.cpp"}, ROUNDS[1]]
    found = [one for one in ratios(ENTRIES, missing) if one.beside == "llama.cpp"]
    assert {one.median for one in found if one.system == "outrider-ngram"} == {6.0}
    assert not [one for one in ratios(ENTRIES, missing[:1]) if one.beside == "llama.cpp"]


def test_medians_over_rounds() -> None:
    found = medians(ENTRIES, ROUNDS)
    assert found["outrider"].decode[1].decode_tokens_per_s == 50
    assert found["outrider"].decode[0].ttft_ms == Spread(50, 50, 50)
    assert found["outrider"].decode[0].accept_length is None
    assert found["outrider"].prefill[1].total_prefill_tokens_per_s == 500


def test_tables() -> None:
    speeds = speed_table(medians(ENTRIES, ROUNDS)).splitlines()
    assert speeds[2] == "| outrider | 1 | 50.0 | 25.0 | 50.0 |  | 500.0 |  |"
    assert len(speeds) == 2 + 2 + 2 + 2 + 1 + 1
    lines = ratio_table(ratios(ENTRIES, ROUNDS)).splitlines()
    assert lines[0] == "| times as fast as | streams | llama.cpp | outrider | llama.cpp-q8 |"
    assert "| outrider-ngram, decode | 1 | 3.00x | 1.50x |  |" in lines
