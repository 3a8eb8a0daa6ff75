"""Figures of `bench goodput` and `bench useless`: ratios within a turn, the best fixed tree, drafts that are wrong."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc.aio
import numpy as np
import pytest

from bench import _pairs, goodput, useless
from bench._goodput_stand_in import ROW_MS, step_ms
from bench._pairs import PLAIN, PLANNED, TurnLoad, WayFigures, fixed, measure, summary, table
from bench._wire_script import Setting
from bench._wrong_draft import NUM_NODES, WrongDrafter
from draft_service.drafters.base import DraftRequest
from outrider.errors import StartupError
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import pack_ids
from tests.draft_service.model_rig import session

TREE = fixed(3, 1, 4)


def found(**tokens_per_s: list[float]) -> dict[int, dict[str, WayFigures]]:
    ways = {
        name.replace("tree", TREE.name): WayFigures(rates, [2.0 for _ in rates], [6 for _ in rates])
        for name, rates in tokens_per_s.items()
    }
    return {8: ways}


def test_ratios_are_taken_within_a_turn() -> None:
    # The second turn fell on a slow minute; the median rates alone would say 1.5.
    result = summary(found(plain=[100.0, 10.0, 100.0], planned=[150.0, 20.0, 120.0]), PLAIN.name)
    planned = result["batches"]["8"]["planned"]
    assert planned["over_plain"] == {"median": 1.5, "least": 1.2, "most": 2.0}
    assert planned["tokens_per_s"] == 120.0
    assert (planned["accept_length"], planned["drafted_tokens"]) == (2.0, 18)
    assert result["batches"]["8"]["plain"]["over_plain"]["median"] == 1.0


def test_the_planner_is_held_to_the_fixed_tree_that_did_best() -> None:
    ways = found(plain=[200.0], planned=[90.0], tree=[100.0])
    ways[8]["1,1,2"] = WayFigures([80.0], [1.5], [1])
    result = summary(ways, PLAIN.name)
    assert result["batches"]["8"]["planned"]["over_best_fixed"] == pytest.approx(0.9)
    assert "over_best_fixed" not in result["batches"]["8"][TREE.name]


def test_it_is_held_to_that_tree_within_a_turn() -> None:
    # The median rates alone would say 55 / 60.
    ways = found(plain=[50.0, 50.0, 50.0], planned=[110.0, 55.0, 27.5], tree=[100.0, 60.0, 20.0])
    assert summary(ways, PLAIN.name)["batches"]["8"]["planned"]["over_best_fixed"] == pytest.approx(1.1)


def test_without_fixed_trees_there_is_none_to_be_held_to() -> None:
    result = summary(found(plain=[200.0], planned=[190.0]), PLAIN.name)
    assert "over_best_fixed" not in result["batches"]["8"]["planned"]


def test_the_table_has_a_line_for_each_way() -> None:
    lines = table(summary(found(plain=[100.0], planned=[150.0]), PLAIN.name), PLAIN.name).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["8", "plain", "100.0", "2.00", "1.000"],
        ["8", "planned", "150.0", "2.00", "1.500"],
    ]


@pytest.mark.parametrize("bench", [goodput, useless])
def test_figures_are_written_before_the_table(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def measure(*args: Any) -> dict[str, Any]:
        return {"batches": {}}

    def print_table(*args: Any) -> str:
        raise BrokenPipeError

    monkeypatch.setattr(bench, "_measure", measure)
    monkeypatch.setattr(bench, "table", print_table)
    output = tmp_path / "figures.json"
    with pytest.raises(BrokenPipeError):
        bench.main(["--output", str(output)])
    assert json.loads(output.read_text())["batches"] == {}


def test_trees_as_they_are_named() -> None:
    ways = goodput.trees(goodput.DEFAULT_TREES)
    assert [way.name for way in ways] == ["1,1,2", "3,1,4", "5,4,8"]
    last = ways[-1].params
    assert (last.enabled, last.num_steps, last.topk, last.num_draft_tokens) == (True, 5, 4, 8)
    assert goodput.trees("none") == []
    with pytest.raises(argparse.ArgumentTypeError, match="STEPS,BRANCHES,TOKENS"):
        goodput.trees("1,1,2/3,1")


class Echo:
    """A stand-in for a verify service: each call takes `seconds` of the clock, and commits three tokens a step."""

    def __init__(self) -> None:
        self.now = 0.0
        self.short = 0  # tokens that an answer lacks
        self.error: Exception | None = None
        self.asked: list[tuple[bytes, bool, int]] = []  # prompt, speculates, tokens

    def perf_counter(self) -> float:
        return self.now

    async def Generate(self, request: verify_pb2.GenerateRequest) -> AsyncIterator[verify_pb2.GenerateResponse]:
        speculates, count = request.speculative.enabled, request.sampling.max_tokens
        self.asked.append((request.prompt_tokens, speculates, count))
        self.now += count * (0.01 if speculates else 0.02)
        stats = common_pb2.SpeculationStats(verify_steps=count // 3, committed_tokens=count, draft_tokens=2 * count)
        yield verify_pb2.GenerateResponse(tokens=[1] * (count - self.short))
        if self.error:
            raise self.error
        yield verify_pb2.GenerateResponse(finish=verify_pb2.GenerateFinish(speculation=stats))


@pytest.mark.asyncio
async def test_each_turn_runs_all_ways_on_the_same_prompts_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    echo, prompts = Echo(), [pack_ids([i]) for i in range(3)]
    monkeypatch.setattr(_pairs, "time", echo)
    ways = [PLAIN, PLANNED]
    measured = await measure(cast("Any", echo), prompts, ways, TurnLoad([1, 2], max_tokens=30, turns=2))
    assert measured[1]["plain"].tokens_per_s == pytest.approx([50.0, 50.0])
    assert measured[2]["planned"].tokens_per_s == pytest.approx([100.0, 100.0])
    assert measured[2]["planned"].accept_length == [3.0, 3.0]
    assert measured[2]["planned"].drafted == [120, 120]
    warmed = [prompt for prompt, _, count in echo.asked if count != 30]
    asked = [(prompt, speculates) for prompt, speculates, count in echo.asked if count == 30]
    assert warmed == [*prompts, *prompts]
    assert Counter(asked) == {(prompt, way): 2 for prompt, way in itertools.product(prompts, (True, False))}
    assert [speculates for _, speculates in asked] == [
        False, True, False, False, True, True,
        True, False, True, True, False, False,
    ]  # fmt: skip


class Slow(Echo):
    """Others' answers go on until one with a fixed tree has begun, which takes for ever, or fails at once."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.begun = asyncio.Event()
        self.left: list[bytes] = []
        self.fails = fails

    async def Generate(self, request: verify_pb2.GenerateRequest) -> AsyncIterator[verify_pb2.GenerateResponse]:
        if request.speculative.num_draft_tokens:
            self.begun.set()
            if self.fails:
                return
            try:
                await asyncio.Event().wait()
            finally:
                self.left.append(request.prompt_tokens)
        if request.sampling.max_tokens == 30:
            await self.begun.wait()
            self.begun.clear()
        async for response in super().Generate(request):
            yield response


@pytest.mark.asyncio
async def test_a_stream_beside_the_others_counts_in_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, prompts = Slow(), [pack_ids([1]), pack_ids([2])]
    monkeypatch.setattr(_pairs, "time", slow)
    load = TurnLoad([1], max_tokens=30, turns=2, beside=TREE)
    measured = await measure(cast("Any", slow), prompts, [PLAIN, PLANNED], load)
    assert measured[1]["plain"].tokens_per_s == pytest.approx([50.0, 50.0])
    assert measured[1]["planned"].drafted == [60, 60]
    assert slow.left == 4 * prompts[:1]  # one in each way of each turn, which ended with it


@pytest.mark.asyncio
async def test_a_stream_beside_the_others_that_fails_is_told() -> None:
    with pytest.raises(StartupError, match=r"^verify ended an answer after 0 of 30 tokens"):
        await measure(
            cast("Any", Slow(fails=True)), [pack_ids([1])], [PLAIN],
            TurnLoad([1], max_tokens=30, turns=1, beside=TREE),
        )  # fmt: skip


@pytest.mark.asyncio
async def test_an_answer_that_fails_is_no_fast_one() -> None:
    echo = Echo()

    async def ask() -> None:
        await measure(cast("Any", echo), [pack_ids([1])], [PLAIN], TurnLoad([2], max_tokens=30, turns=1))

    echo.short = 5
    with pytest.raises(StartupError, match=r"^verify ended an answer after 3 of 8 tokens"):
        await ask()
    nothing = grpc.aio.Metadata()
    echo.error = grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, nothing, nothing, "no room", None)
    with pytest.raises(StartupError, match=r"^verify ended an answer with RESOURCE_EXHAUSTED: no room$"):
        await ask()


def test_rows_cost_what_the_stand_in_says() -> None:
    setting = Setting(
        verify_ms=7.5, draft_ms=4.9, accept_length=3.69, hit_rate=0.9, batch=1, topk=1, num_steps=7,
        num_draft_tokens=33, feature_width=0, num_tokens=96, burn=False, early=False, seed=0,
    )  # fmt: skip
    assert step_ms(setting, 32) == pytest.approx(7.5 + 32 * ROW_MS)


def test_a_wrong_drafters_chains_are_said_to_be_near_certain() -> None:
    drafter = WrongDrafter(0.0)
    (draft,) = drafter.draft([DraftRequest(session([1, 2, 3]), 32)])
    assert len(draft) == NUM_NODES
    assert draft.parents.tolist() == list(range(-1, NUM_NODES - 1))
    assert np.all(np.diff(draft.probabilities) < 0.0)
    assert draft.probabilities[0] == pytest.approx(0.9)
