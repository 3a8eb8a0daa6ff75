"""What `outrider top` shows, against scrapes whose numbers are known and a process that answers."""

from __future__ import annotations

import asyncio
import pty
import sys
import termios
from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry

from outrider.args.top import TopArgs
from outrider.errors import StartupError, Unavailable
from outrider.metrics import Buckets, Families, Family, Reading, text
from outrider.metrics_http import serve_metrics
from outrider.scrape import Scrape, Span, fetch, parse
from outrider.top import View, main
from outrider.top_frame import fitted, frame

VERIFY = """
outrider_steps_total{{model="toy"}} {steps}
outrider_requests_running{{model="toy"}} 3
outrider_kv_usage_ratio{{model="toy"}} 0.25
outrider_generation_tokens_total{{model="toy"}} {tokens}
outrider_step_seconds_sum{{model="toy",kind="decode"}} {seconds}
outrider_step_seconds_count{{model="toy",kind="decode"}} {steps}
outrider_step_phase_seconds_total{{model="toy",phase="forward"}} {seconds}
outrider_step_phase_seconds_total{{model="toy",phase="wait"}} {waited}
outrider_brake_decisions_total{{model="toy",decision="silence"}} {silenced}
outrider_brake_silent_sessions{{model="toy",algorithm="EAGLE3"}} 1
outrider_brake_tax_seconds{{model="toy",algorithm="EAGLE3"}} 0.0004
outrider_drafter_up{{model="toy",algorithm="EAGLE3"}} 1
outrider_drafter_sessions{{model="toy",algorithm="EAGLE3"}} 3
outrider_spec_verify_calls_total{{model="toy",algorithm="EAGLE3"}} {steps}
outrider_spec_committed_tokens_total{{model="toy",algorithm="EAGLE3"}} {tokens}
outrider_spec_draft_tokens_total{{model="toy",algorithm="EAGLE3"}} {drafted}
outrider_spec_accepted_tokens_total{{model="toy",algorithm="EAGLE3"}} {accepted}
outrider_overlap_total{{model="toy",algorithm="EAGLE3",result="hit"}} {accepted}
outrider_overlap_total{{model="toy",algorithm="EAGLE3",result="miss"}} {accepted}
"""
DRAFT = """
outrider_draft_links{algorithm="EAGLE3",state="enlisted"} 1
outrider_draft_sessions{algorithm="EAGLE3",replica="unix:/v"} 3
outrider_planner_speculates{algorithm="EAGLE3"} SPECULATES
outrider_planner_outcomes{algorithm="EAGLE3"} 2
outrider_planner_steps{algorithm="EAGLE3"} 5
outrider_planner_branches{algorithm="EAGLE3"} 4
outrider_planner_draft_tokens{algorithm="EAGLE3"} 8
outrider_planner_decisions_total{algorithm="EAGLE3",decision="reshaped"} 7
outrider_draft_steps_total{algorithm="EAGLE3",kind="tree"} STEPS
outrider_draft_seconds_count{algorithm="EAGLE3",kind="tree"} CALLS
outrider_draft_copies_total{algorithm="EAGLE3"} CALLS
outrider_draft_copied_nodes_total{algorithm="EAGLE3"} STEPS
outrider_draft_copied_nodes_accepted_total{algorithm="EAGLE3"} CALLS
"""


def verify_span() -> Span:
    before = VERIFY.format(steps=100, tokens=200, seconds=1.0, waited=0.5, silenced=1, drafted=400, accepted=100)
    now = VERIFY.format(steps=140, tokens=280, seconds=1.4, waited=0.6, silenced=3, drafted=560, accepted=140)
    return Span(parse(before, 10.0), parse(now, 12.0))


def draft_span(speculates: int = 1) -> Span:
    text = DRAFT.replace("SPECULATES", str(speculates))
    before, now = (
        text.replace("STEPS", steps).replace("CALLS", calls) for steps, calls in (("100", "30"), ("125", "40"))
    )
    return Span(parse(before, 10.0), parse(now, 12.0))


def test_a_verify_service_shows_rates_of_the_time_between() -> None:
    shown = "\n".join(frame({"http://v/metrics": verify_span()}, {}))
    assert "verify  toy  http://v/metrics" in shown
    assert "running 3, waiting 0, pages 25 %" in shown
    assert "40.0 tokens/s, 20.0 steps/s, decode step 10.00 ms, prefill step -" in shown
    assert "forward 80 %, wait 20 %" in shown
    assert "silenced 3 (+2)" in shown
    row = next(line for line in shown.splitlines() if "EAGLE3" in line).split()
    assert row == ["EAGLE3", "1", "3", "1", "0.40", "ms", "20.0", "2.00", "25", "%", "50", "%"]


@pytest.mark.parametrize(("running", "told"), [(3, "in one step for longer"), (0, "  idle")])
def test_a_verify_service_whose_counters_stand_still_is_in_a_step_or_idle(running: int, told: str) -> None:
    text = VERIFY.format(steps=100, tokens=200, seconds=1.0, waited=0.5, silenced=1, drafted=400, accepted=100)
    text = text.replace('running{model="toy"} 3', f'running{{model="toy"}} {running}')
    assert told in "\n".join(frame({"u": Span(parse(text, 10.0), parse(text, 12.0))}, {}))


def test_a_drafter_shows_its_plan() -> None:
    shown = "\n".join(frame({"u": draft_span()}, {}))
    assert "draft  EAGLE3  u" in shown
    assert "plan: 5 steps, 4 branches, 8 tokens, 2.5 steps run; 2 outcomes ahead; reshaped 7" in shown
    assert "copies of sessions' own texts 40 (+10), accepted 40 % of nodes" in shown
    assert "does not draft" in "\n".join(frame({"u": draft_span(0)}, {}))


def test_what_does_not_answer_and_what_is_neither_is_said() -> None:
    other = Span(parse("a_total 1\n", 0.0), parse("a_total 2\n", 1.0))
    assert frame({"u": other}, {"w": "w: refused"}) == [
        "u: neither a verify nor a draft service", "", "no answer: w: refused",
    ]  # fmt: skip


def test_a_counter_that_began_anew_has_not_grown() -> None:
    span = Span(parse("a_total 9\n", 0.0), parse("a_total 2\n", 1.0))
    assert span.rate("a_total") == 0.0
    assert span.mean_ms("a") is None


def test_what_a_process_tells_sends_a_terminal_nothing() -> None:
    shown = frame(
        {"u": Span(*(parse('outrider_steps_total{model="\x1b[31mred"} 1\n', at_s) for at_s in (1.0, 2.0)))}, {}
    )
    assert shown[0] == r"verify  \x1b[31mred  u"


def test_a_view_shows_processes_from_their_second_answer_on() -> None:
    answers: list[Scrape | Unavailable] = [
        draft_span().before, Unavailable("u: gone"), draft_span().before,
        draft_span().now,
    ]  # fmt: skip

    def next_answer(url: str, at_s: float) -> Scrape:
        answer = answers.pop(0)
        if isinstance(answer, Unavailable):
            raise answer
        return answer

    other = View(["u"], lambda url, at_s: parse("a_total 1\n", at_s), lambda: 0.0)
    other.look()
    assert (other.strangers, other.failed) == (["u"], {})
    view = View(["u"], next_answer, lambda: 0.0)
    assert view.look() == []
    assert view.look() == ["no answer: u: gone"]
    assert view.failed
    assert view.look() == []
    assert view.look()[0] == "draft  EAGLE3  u"
    assert not view.strangers


@pytest.mark.asyncio
async def test_metrics_are_fetched_from_a_process_that_tells_them() -> None:
    def read(reading: Reading) -> None:
        reading.add("outrider_x_total", 5.0, "b")
        buckets = Buckets((0.1, 1.0))
        buckets.observe(0.5)
        reading.add_buckets("outrider_y_seconds", buckets)

    families: Sequence[Family] = (
        Family("outrider_x_total", "counter", "X.", ("a",)),
        Family("outrider_y_seconds", "histogram", "Y."),
    )
    registry = CollectorRegistry()
    registry.register(Families(families, read))
    assert parse(text(registry).decode(), 0.0).total("outrider_x_total", a="b") == 5.0
    async with serve_metrics(registry, "127.0.0.1", 0) as address:
        assert address is not None
        scrape = await asyncio.to_thread(fetch, address, 3.0)
        with pytest.raises(Unavailable, match="404"):
            await asyncio.to_thread(fetch, address + "x", 3.0)
    assert scrape.total("outrider_y_seconds_sum") == 0.5
    assert scrape.at_s == 3.0
    with pytest.raises(Unavailable, match="refused"):
        await asyncio.to_thread(fetch, address, 3.0)


LINES = ["verify  a long line", *"abcdefg", "", "draft  another", *"hijk", ""]


@pytest.mark.parametrize(
    ("columns", "rows", "shown"),
    [
        (80, 14, LINES[:-1]),
        (9, 9, ["verify  a", *"abc", "", "draft  an", *"hij"]),
        (80, 3, [LINES[0], "", "draft  another"]),
        (80, 1, [LINES[0]]),
    ],
)
def test_a_small_terminal_has_something_of_all(columns: int, rows: int, shown: list[str]) -> None:
    assert fitted(LINES, columns, rows) == shown


@pytest.mark.parametrize(("term", "size", "escapes"), [("xterm", (10, 40), True), ("dumb", (24, 80), False)])
def test_a_terminal_gets_what_it_has_room_for_and_obeys(
    term: str, size: tuple[int, int], escapes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, size)
    monkeypatch.setenv("TERM", term)
    frames = iter([[], LINES, LINES])  # the first look shows nothing

    def look(view: View) -> list[str]:
        if (lines := next(frames, None)) is None:
            raise KeyboardInterrupt
        return lines

    monkeypatch.setattr(View, "look", look)
    with open(theirs, "w") as terminal, open(ours, "rb", buffering=0) as screen:
        monkeypatch.setattr(sys, "stdout", terminal)
        with pytest.raises(KeyboardInterrupt):
            main(TopArgs(interval_s=0.001))
        text = screen.read(65536).decode()
    assert ("\x1b" in text) == escapes
    assert text.count("\n") == 2 * min(len(LINES), size[0] - 1)
    assert text.count("draft") == 2


def test_flags_are_checked() -> None:
    assert TopArgs.parse(["--metrics", "http://a/metrics", "--once"]).metrics == ("http://a/metrics",)
    with pytest.raises(StartupError, match="--interval-s"):
        TopArgs(interval_s=0.0)
    with pytest.raises(StartupError, match="must be a URL"):
        TopArgs(metrics=("localhost:9400",))
