"""Figures of `bench mt_bench`: which answers count, what the table says, and what is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from bench import _metered, early, mt_bench, theory
from bench._server import Served
from bench.mt_bench import Ask, Result, Said, ask_outrider, choose, measure, table
from outrider.errors import StartupError
from outrider.scrape import parse
from tests.bench.openai_stand_in import StandIn, running


def test_ratios_are_taken_within_a_question() -> None:
    # The median speeds alone would say 4 for the second system.
    speeds = {"plain": (8.0, 16.0, 80.0), "speculative": (16.0, 64.0, 80.0)}
    results = [
        Result(system, "writing" if number else "math", number, 17, 16 / speed, 2.0 if system != "plain" else None)
        for number in range(3)
        for system, speed in ((name, of[number]) for name, of in speeds.items())
    ]
    assert table(results).splitlines()[2:] == [
        "| math | 8.0 (1.00x) | 16.0 (2.00x) | 2.00 |",
        "| writing | 48.0 (1.00x) | 72.0 (2.50x) | 2.00 |",
        "| all | 16.0 (1.00x) | 64.0 (2.00x) | 2.00 |",
    ]


def test_a_question_with_a_short_answer_counts_for_no_system() -> None:
    def system(*lengths: int) -> Ask:
        answers = iter((16, *lengths))  # the first warms up
        return lambda text, max_tokens: Said(text, next(answers), 1.0)

    systems = {"plain": system(8, 9, 9), "speculative": system(9, 9, 9)}
    results, differences = measure(systems, choose(1)[:3], 16)
    assert [(one.question_id, one.system) for one in results] == [
        (91, "plain"), (91, "speculative"), (101, "plain"), (101, "speculative"),
    ]  # fmt: skip
    assert differences.answers == 3


def test_the_first_questions_of_each_category() -> None:
    questions = choose(2)
    assert [question.name for question in questions[:4]] == ["81", "82", "91", "92"]
    assert len(questions) == 16


def test_an_answer_is_timed_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn(chunks=(1, 3), token="a\u2028", usage={"speculation": {"accept_length": 1.5}})
    with running(stand_in) as url, httpx.Client(base_url=url) as client:
        said = ask_outrider(client, speculate=True)("one", 9)
        plain = ask_outrider(client, speculate=False)("one", 9)
    assert (said.text, said.tokens, said.accept_length) == ("a\u2028" * 4, 4, 1.5)
    assert said.decode_s > 0
    assert plain.accept_length is None
    assert [body["speculative"] for body in stand_in.bodies] == [{"enabled": True}, {"enabled": False}]


@pytest.mark.parametrize("main", [mt_bench.main, theory.main, early.main])
@pytest.mark.parametrize(
    ("stand_in", "says"), [(StandIn(status=503), "HTTP 503"), (StandIn(cut=True), "broke off"), (None, "no server")]
)
def test_a_server_that_refuses_or_dies_is_told_in_a_line(
    main: Callable[[list[str]], int], stand_in: StandIn | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def serving(*given: Any) -> Iterator[Served]:
        with running(stand_in or StandIn()) as url:
            if stand_in is not None:
                yield Served(url, 1)
        if stand_in is None:
            yield Served(url, 1)

    for module in (mt_bench, _metered):
        monkeypatch.setattr(module, "ours_serving", serving)
    monkeypatch.setattr(_metered, "fetch", lambda url, at_s: parse("", at_s))
    with pytest.raises(StartupError, match=f"{says}.*$"):
        main(["--alone"] if main is mt_bench.main else [])
