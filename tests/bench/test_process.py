"""Processes of benchmarks, and what runs in them: what ends or fails by itself ends the benchmark."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop

from bench import _parts
from bench._main import ended_by_signals
from bench._parts import serve_model, work
from bench._process import process
from bench._wire_script import Setting
from bench._wire_verify import ScriptedRunner
from outrider.args import VerifyArgs
from outrider.cost_table import CostTable
from outrider.errors import StartupError
from verify_service.loading import LoadedModel
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


@pytest.mark.parametrize("interrupt", [signal.default_int_handler, signal.SIG_IGN])  # as of a shell's background
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_processes_and_folders_end_with_a_benchmark_that_is_told_to(run: Any, interrupt: Any) -> None:
    left: list[Any] = []

    async def measure() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with process("bench._wire_echo", f"unix:{folder}/echo") as pid:
                left.extend((folder, pid))
                signal.raise_signal(signal.SIGTERM)
                await asyncio.Event().wait()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        assert ended_by_signals(lambda words: run(measure()), []) == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGINT, before)
    folder, pid = left
    assert not Path(folder).exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.usefixtures("hangups")
def test_the_first_signal_counts() -> None:
    def main(words: list[str]) -> int:
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:
            signal.raise_signal(signal.SIGTERM)
            seen.append("the end of the ending")
        return 0

    seen: list[str] = []
    assert ended_by_signals(main, []) == 128 + signal.SIGHUP
    assert seen


@pytest.mark.asyncio
async def test_an_engine_that_fails_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(step_loop: StepLoop) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(StepLoop, "run", fail)
    monkeypatch.setattr(_parts, "keep_steady", lambda: None)  # not for the tests' own process
    runner = cast("Any", ScriptedRunner(SETTING, 64))
    loaded = LoadedModel(runner, Sizes(64, SETTING.max_len, 64), CostTable({1: 1.0}), "")
    with pytest.raises(ZeroDivisionError):
        async with asyncio.timeout(60):
            await serve_model(VerifyArgs(listen=f"unix:{tmp_path}/verify"), loaded)


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
