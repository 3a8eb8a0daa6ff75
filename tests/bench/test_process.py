"""Processes of benchmarks, and what runs in them: what ends or fails by itself ends the benchmark."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, cast

import pytest

from bench import _parts
from bench._parts import serve_engine, work
from bench._process import process
from bench._wire_script import Setting
from bench._wire_verify import ScriptedRunner
from outrider.args import VerifyArgs
from outrider.cost_table import CostTable
from outrider.errors import StartupError
from verify_service.loading import Engine
from verify_service.sizing import Sizes
from verify_service.step_loop import StepLoop

SETTING = Setting(
    verify_ms=1.0, draft_ms=1.0, accept_length=1.0, hit_rate=0.5, batch=1, topk=1, num_steps=1, num_draft_tokens=2,
    feature_width=0, num_tokens=8, burn=False, early=False, seed=0,
)  # fmt: skip


@pytest.mark.asyncio
async def test_a_process_that_ends_by_itself_ends_the_block() -> None:
    with pytest.raises(StartupError, match=r"^this ended with 0$"):
        async with process("this"):  # which has said a line
            await asyncio.Event().wait()


@pytest.mark.asyncio
async def test_a_process_that_does_not_start_is_no_block() -> None:
    begun = []
    with pytest.raises(StartupError, match=r"^calendar ended with 2$"):
        async with process("calendar", "--no-such-flag"):
            begun.append(True)
    assert not begun


@pytest.mark.asyncio
async def test_what_a_block_fails_of_is_raised_and_the_process_ended(tmp_path: Path) -> None:
    pids: list[int] = []

    async def fail() -> None:
        async with process("bench._wire_echo", f"unix:{tmp_path}/echo") as pid:
            pids.append(pid)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@pytest.mark.asyncio
async def test_an_engine_that_fails_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(step_loop: StepLoop) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(StepLoop, "run", fail)
    monkeypatch.setattr(_parts, "keep_steady", lambda: None)  # not for the tests' own process
    runner = cast("Any", ScriptedRunner(SETTING, 64))
    engine = Engine(runner, Sizes(64, SETTING.max_len, 64), CostTable({1: 1.0}), "")
    with pytest.raises(ZeroDivisionError):
        async with asyncio.timeout(60):
            await serve_engine(VerifyArgs(listen=f"unix:{tmp_path}/verify"), engine)


@pytest.mark.asyncio
async def test_a_worker_that_fails_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        drained = False

        async def run(self) -> None:
            raise ZeroDivisionError

        async def drain(self, grace_s: float) -> None:
            self.drained = True

    monkeypatch.setattr(_parts, "keep_steady", lambda: None)
    worker = Failing()
    with pytest.raises(ZeroDivisionError):
        async with asyncio.timeout(60):
            await work(cast("Any", worker))
    assert worker.drained
