"""`outrider bench wire`: the script that both processes play, and one small run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from bench import wire
from bench._wire_hops import HOPS
from bench._wire_run import Played
from bench._wire_script import NUM_TOP, PROMPT_LEN, Script, Setting
from outrider.errors import StartupError

SETTING = Setting(
    verify_ms=1.0, draft_ms=1.0, accept_length=2.5, hit_rate=0.8, batch=1, topk=4, num_steps=4, num_draft_tokens=16,
    feature_width=0, num_tokens=20_000, burn=False, early=True, seed=1,
)  # fmt: skip


def test_the_script_has_the_wished_means_and_is_the_same_everywhere() -> None:
    assert Setting.from_json(SETTING.to_json()) == SETTING
    chances = SETTING.round_lengths
    assert chances.sum() == pytest.approx(1.0)
    assert chances @ np.arange(1, SETTING.num_steps + 2) == pytest.approx(SETTING.accept_length)
    text, same = Script(SETTING).text(3), Script(SETTING).text(3)
    assert text.tokens.tolist() == same.tokens.tolist()
    ends = np.flatnonzero(text.ends)
    assert np.diff(ends).mean() == pytest.approx(SETTING.accept_length, rel=0.03)
    assert ends[0] > PROMPT_LEN


def test_the_drafter_errs_at_the_ends_of_rounds_and_guesses_them_below() -> None:
    text = Script(SETTING).text(1)
    assert all(len(set(row)) == NUM_TOP for row in text.top_tokens[:500].tolist())
    inside = ~text.ends
    assert (text.top_tokens[inside, 0] == text.tokens[inside]).all()
    lengths = np.diff(np.flatnonzero(text.ends), prepend=PROMPT_LEN)
    whole = lengths == SETTING.num_steps + 1
    for ends, place in ((np.flatnonzero(text.ends)[whole], 0), (np.flatnonzero(text.ends)[~whole], SETTING.topk)):
        right = text.top_tokens[ends] == text.tokens[ends, None]
        assert np.flatnonzero(right.any(axis=0)).tolist() == [place]
        assert right[:, place].mean() == pytest.approx(SETTING.hit_rate, abs=0.04)


def test_time_in_grpc_is_both_ways_of_a_trip_without_the_first_ones() -> None:
    trips = [(f"r{i}", 1000 * i + 3, f"f{i}", 1000 * i + 20) for i in range(20)]
    verify = {
        "sent_ns": {f"r{i}": 1000 * i - (500_000 if i < 3 else 0) for i in range(20)},
        "came_ns": {f"f{i}": 1000 * i + 24 for i in range(20)},
    }
    played = Played(SETTING, [], verify, {"trips": [*trips, ("unknown", 0, "f1", 0)]})
    assert wire._grpc_ms(played) == pytest.approx([7e-6] * 17)


@pytest.mark.parametrize(("batch", "topk", "width"), [(2, 4, 96), (1, 1, 0)])
def test_a_small_run_plays_the_script_and_counts_add_up(tmp_path: Path, batch: int, topk: int, width: int) -> None:
    output, picture = tmp_path / "figures.json", tmp_path / "rounds.svg"
    words = [
        "--verify-ms", "8", "--draft-ms", "1", "--accept-length", "2.5", "--batch", str(batch), "--topk", str(topk),
        "--num-steps", "4", "--feature-width", str(width), "--seconds", "0.4", "--output", str(output),
        *(("--picture", str(picture)) if batch == 1 else ()),
    ]  # fmt: skip
    assert wire.main(words) == 0
    figures = json.loads(output.read_text(encoding="utf-8"))
    assert set(figures["grpc_over_echo"]) == set(figures["grpc_ms"]) == {"p50", "p99"}
    for way in ("sequential", "overlap"):
        found = figures[way]
        assert found["share_of_theory"] > 0
        # Of each session the first token comes from its prompt.
        assert found["accept_length"] * found["verify_steps"] == pytest.approx(found["num_tokens"] - batch)
        assert 0 <= found["hit_rate"] <= 1
        assert found["bytes_a_round"]["to_drafter"] > 0  # rows go through shared memory
    assert figures["sequential"]["hit_rate"] == 0
    assert figures["overlap"]["hit_rate"] > 0
    assert set(figures["sequential"]["hops_ms"]) == {*HOPS, "draft_steps"}
    assert figures["grpc_ms"]["p50"] > 0
    assert figures["round_trip_ms"] == figures["echo_ms"]["p50"]
    assert batch > 1 or picture.stat().st_size > 10_000


def test_figures_are_written_before_anything_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def measure(args: argparse.Namespace) -> tuple[dict[str, int], None, None]:
        return {"figure": 1}, None, None

    def draw(runs: dict[str, None], path: Path) -> None:
        raise OSError("no room")

    monkeypatch.setattr(wire, "_measure", measure)
    monkeypatch.setattr(wire, "draw", draw)
    output = tmp_path / "figures.json"
    with pytest.raises(OSError, match="no room"):
        wire.main(["--output", str(output), "--picture", str(tmp_path / "rounds.svg")])
    assert json.loads(output.read_text()) == {"figure": 1}


def test_a_picture_of_no_known_kind_is_refused_at_once() -> None:
    with pytest.raises(StartupError, match=r"^--picture writes \.png, \.svg or \.pdf, not rounds\.foo$"):
        wire.main(["--picture", "rounds.foo"])


@pytest.mark.parametrize(("words", "tokens"), [([], 6), (["--topk=4"], 16), (["--topk=2", "--num-steps=2"], 7)])
def test_trees_have_sixteen_nodes_where_they_can_have_them(words: list[str], tokens: int) -> None:
    assert wire._parse(["--accept-length=2", *words]).num_draft_tokens == tokens
