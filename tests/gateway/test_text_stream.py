"""Responses of one choice as text, and what is counted on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.detokenizer import ByteDetokenizer, detokenizer_factory
from gateway.prediction import Prediction
from gateway.text_stream import ChoiceText, Delta, OutputRules
from gateway.totals import Totals
from outrider.speculation_count import total_speculation
from outrider.v1 import common_pb2, verify_pb2
from tests.gateway import models

TOKENIZER = models.byte_level()
FACTORY = detokenizer_factory(TOKENIZER)
EOS = 2
ONE_STEP = common_pb2.SpeculationStats(verify_steps=1, draft_tokens=5, accepted_tokens=1, committed_tokens=2)


def rules(*stops: str, origins: bool = False) -> OutputRules:
    """Rules for the test's tokenizer."""
    return OutputRules(lambda: FACTORY.make(skip_special=True), stops, pieces=origins)


def ids(text: str) -> list[int]:
    """The text's tokens."""
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def response(tokens: list[int], num_accepted: int | None = None, **parts: Any) -> verify_pb2.GenerateResponse:
    """One response of choice 0: a step that verified 4 drafts, or without `num_accepted` what prefill gave."""
    num_drafted = None if num_accepted is None else 4
    return verify_pb2.GenerateResponse(tokens=tokens, num_accepted=num_accepted or 0, num_drafted=num_drafted, **parts)


def start(cached: int = 0) -> verify_pb2.GenerateStart:
    """The beginning of a call."""
    return verify_pb2.GenerateStart(cached_tokens=cached)


def finish(stopped: bool = False, stats: common_pb2.SpeculationStats | None = None) -> verify_pb2.GenerateFinish:
    """The end of a call."""
    return verify_pb2.GenerateFinish(
        reason=verify_pb2.FINISH_REASON_STOP if stopped else verify_pb2.FINISH_REASON_LENGTH,
        stop_token_id=EOS if stopped else None, speculation=stats,
    )  # fmt: skip


def feed(choice: ChoiceText, *responses: verify_pb2.GenerateResponse) -> list[Delta]:
    """Deltas of the responses, until the choice ends."""
    made: list[Delta] = []
    for item in responses:
        assert not choice.finished
        made.append(choice.feed(item))
    return made


@given(st.text(max_size=30), st.lists(st.integers(1, 4), min_size=40, max_size=40), st.booleans())
def test_text_and_origins_are_whole(text: str, sizes: list[int], stopped: bool) -> None:
    tokens, steps = ids(text), []
    for size in sizes:
        steps.append(tokens[:size])
        tokens = tokens[size:]
    steps.append(tokens)
    choice = ChoiceText(0, rules("never\x01seen", origins=True))
    deltas = feed(
        choice, *(response(step, max(0, len(step) - 1)) for step in steps), response([], finish=finish(stopped))
    )
    assert "".join(delta.text for delta in deltas) == text
    for delta in deltas:
        assert delta.pieces is not None
        assert "".join(piece.text for piece in delta.pieces) == delta.text
    assert [piece.token for delta in deltas for piece in delta.pieces or () if piece.token is not None] == ids(text)
    assert deltas[-1].finish_reason == ("stop" if stopped else "length")
    assert choice.completion_tokens == len(ids(text))


@given(st.text("abEND ", max_size=30), st.lists(st.sampled_from(["END", "DE", "a b"]), min_size=1, max_size=2))
def test_pieces_are_the_text_whatever_stops_it(text: str, stops: list[str]) -> None:
    choice = ChoiceText(0, rules(*stops, origins=True))
    told: list[int] = []
    tokens = ids(text)
    for index, token in enumerate(tokens):
        last = finish() if index == len(tokens) - 1 else None
        delta = choice.feed(response([token], 0, finish=last))
        assert delta.pieces is not None
        assert "".join(piece.text for piece in delta.pieces) == delta.text
        told += [piece.token for piece in delta.pieces if piece.token is not None]
        if choice.finished:
            break
    assert told == tokens[: choice.completion_tokens]


def test_origins_tell_drafts_from_the_targets_own() -> None:
    one, two, three = ids("H"), ids("e"), ids("!")
    choice = ChoiceText(0, rules(origins=True))
    algorithm = common_pb2.ALGORITHM_NGRAM
    deltas = feed(choice, response(one), response(one + two + three, 2, algorithm=algorithm))
    told = [(piece.text, piece.origin, piece.depth, piece.step) for delta in deltas for piece in delta.pieces or ()]
    assert told == [("H", "target", 0, 0), ("H", "accepted", 1, 1), ("e", "accepted", 2, 1), ("!", "bonus", 0, 1)]


def test_a_stop_string_ends_the_choice_and_the_count() -> None:
    choice = ChoiceText(0, rules("END"))
    text = ids("one ") + ids("E") + ids("N") + ids("D") + ids(" two")
    deltas = feed(choice, response(text[:2]), response(text[2:], 1))
    assert "".join(delta.text for delta in deltas) == "one "
    assert (deltas[-1].finish_reason, deltas[-1].matched) == ("stop", "END")
    assert choice.completion_tokens == len(ids("one ")) + 3
    assert choice.finished


def test_no_stop_string_ends_an_output_within_min_tokens() -> None:
    choice = ChoiceText(0, OutputRules(rules().make_detokenizer, ("E",), min_tokens=4))
    deltas = feed(choice, response(ids("E") + ids("x")), response(ids("E") + ids("E") + ids("y") + ids("E"), 3))
    assert "".join(delta.text for delta in deltas) == "ExEEy"
    assert (deltas[-1].finish_reason, choice.completion_tokens) == ("stop", 6)


@pytest.mark.parametrize("pieces", [True, False])
@pytest.mark.parametrize("step", [1, 2, 99])
@pytest.mark.parametrize(
    ("tokens", "stops", "min_tokens", "text", "num_tokens"),
    [
        (["x", "<", "END", ">", "y"], ["<END>"], 3, "x", 4),
        (["x", "<", "END", ">", "y"], ["<END>"], 4, "x<END>y", None),
        (["a", "a", "a", "b", "c"], ["aab"], 3, "a", 4),
        (["aa", "aab", "aab"], ["aab"], 2, "aaaab", 3),
        (["a", "a", "a", "b"], ["aa"], 2, "a", 3),
        (["a", "b", "c", "d"], ["b", "abc"], 2, "", 3),
        (["x<", "END>y", "<END", ">"], ["<END>"], 2, "x<END>y", 4),
        (["END E", "ND"], ["END"], 1, "END ", 2),
        (["x", "END"], ["END"], 2, "xEND", None),
    ],
)
def test_a_stop_string_that_begins_within_min_tokens_ends_the_output_after_them(
    tokens: list[str], stops: list[str], min_tokens: int, text: str, num_tokens: int | None, step: int, pieces: bool
) -> None:
    made = OutputRules(lambda: ByteDetokenizer([*tokens]), (*stops,), min_tokens=min_tokens, pieces=pieces)
    choice, deltas = ChoiceText(0, made), list[Delta]()
    for at in range(0, len(tokens), step):
        step_tokens = list(range(len(tokens)))[at : at + step]
        deltas.append(
            choice.feed(response(step_tokens, finish=finish() if step_tokens[-1] == len(tokens) - 1 else None))
        )
        if choice.finished:
            break
    assert "".join(delta.text for delta in deltas) == text
    if pieces:
        assert "".join(piece.text for delta in deltas for piece in delta.pieces or ()) == text
    assert deltas[-1].finish_reason == ("length" if num_tokens is None else "stop")
    assert choice.completion_tokens == (num_tokens or len(tokens))


def test_half_a_character_within_min_tokens_ends_no_output() -> None:
    half = ids("\u4f60")[0]
    choice = ChoiceText(0, OutputRules(rules().make_detokenizer, ("\ufffd",), min_tokens=1))
    (delta,) = feed(choice, response([half], finish=finish()))
    assert (delta.text, delta.finish_reason) == ("\ufffd", "length")


def test_text_held_for_a_stop_string_comes_out_at_the_end() -> None:
    choice = ChoiceText(0, rules("END", origins=True))
    deltas = feed(choice, response(ids("xE") + ids("N"), finish=finish()))
    assert deltas[0].text == "xEN"
    assert deltas[0].finish_reason == "length"


def test_the_token_that_ends_an_output_is_counted_and_not_written() -> None:
    own = ids("!")[0]
    kept = OutputRules(lambda: FACTORY.make(skip_special=False), ())
    for end in (EOS, own):
        choice = ChoiceText(0, kept)
        last = verify_pb2.GenerateFinish(reason=verify_pb2.FINISH_REASON_STOP, stop_token_id=end)
        (delta,) = feed(choice, response([*ids("!ok"), end], finish=last))
        assert delta.text == "!ok"
        assert (delta.finish_reason, delta.matched) == ("stop", end)
        assert choice.completion_tokens == len(ids("!ok")) + 1


def test_a_choice_that_was_whole_before_it_was_resumed_ends_with_what_was_given() -> None:
    choice = ChoiceText(0, OutputRules(lambda: FACTORY.make(skip_special=False), ()))
    last = verify_pb2.GenerateFinish(reason=verify_pb2.FINISH_REASON_STOP, stop_token_id=ids("k")[0])
    deltas = feed(choice, response(ids("ok"), start=start()), response([], start=start(), finish=last))
    assert ["".join(delta.text for delta in deltas), deltas[-1].matched] == ["ok", ids("k")[0]]


def test_half_a_character_before_the_end_is_told_with_its_token() -> None:
    half = ids("\u4f60")[0]
    for stops in ((), ("never",)):
        choice = ChoiceText(0, rules(*stops, origins=True))
        deltas = feed(choice, response([half], start=start()), response([EOS], finish=finish(stopped=True)))
        pieces = [piece for delta in deltas for piece in delta.pieces or () if not piece.ends]
        assert "".join(delta.text for delta in deltas) == "\ufffd"
        assert [(piece.token, piece.text) for piece in pieces] == [(half, "\ufffd")]


def test_verifys_own_count_is_taken() -> None:
    choice = ChoiceText(0, rules())
    feed(choice, response([40], start=start(7)), response([41, 42], 1),
         response([], finish=finish(stats=ONE_STEP)))  # fmt: skip
    assert choice.cached_tokens == 7
    assert (choice.speculation.verify_steps, choice.speculation.draft_tokens) == (1, 5)
    assert choice.speculation.accept_length == 2.0


def test_a_broken_call_is_counted_as_it_was_seen() -> None:
    choice = ChoiceText(0, rules())
    feed(choice, response([40], start=start(7)), response([41, 42, 43], 2), response([44], 0),
         response([45], 0, start=start(99)), response([46, 47], 1),
         response([], finish=finish(stats=ONE_STEP)))  # fmt: skip
    count = choice.speculation
    assert choice.cached_tokens == 7
    assert choice.completion_tokens == 8
    assert (count.verify_steps, count.accepted_tokens, count.committed_tokens) == (3, 3, 6)
    assert count.draft_tokens == 2 * 4 + 5  # those of the broken call as they were seen
    assert count.accepted_histogram == [1, 0, 1]


def test_a_choice_cut_by_a_stop_string_is_counted_as_it_was_seen() -> None:
    choice = ChoiceText(0, rules("c"))
    feed(choice, response(ids("a"), start=start()), response(ids("b") + ids("c") + ids("d"), 2))
    count = choice.speculation
    assert (count.verify_steps, count.accepted_tokens, count.committed_tokens) == (1, 2, 2)
    assert count.accept_length == 2.0


def test_totals_are_those_of_all_choices_at_any_time() -> None:
    totals, predicting = Totals(), replace(rules("c"), prediction=Prediction(ids("abab")))
    choices = [ChoiceText(index, predicting, totals) for index in range(2)]
    steps = [
        response(ids("a"), start=start(7)), response(ids("b"), 1), response(ids("b"), 0, start=start(99)),
        response(ids("ab"), 1),
    ]  # fmt: skip
    cut, ended = response(ids("ac"), 1), response([], finish=finish(stats=ONE_STEP))
    for index, made in [(1, steps[0]), *((0, step) for step in steps), (1, steps[1]), (0, cut), (1, ended)]:
        choices[index].feed(made)
        assert totals.completion_tokens == sum(choice.completion_tokens for choice in choices)
        assert totals.speculation == total_speculation(choice.speculation for choice in choices)
        assert totals.cached_tokens == choices[0].cached_tokens
    assert [choice.finished for choice in choices] == [True, True]
    assert totals.accepted_prediction_tokens == len(ids("abab")) + len(ids("ab"))
