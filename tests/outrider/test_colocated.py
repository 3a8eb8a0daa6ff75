"""`outrider colocated`: its words, and the order in which the two services come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from outrider import colocated
from outrider.args import DraftArgs, VerifyArgs
from outrider.backoff import Backoff
from outrider.colocated import Colocated
from outrider.errors import StartupError
from outrider.in_memory import InMemoryServer
from outrider.stopping import Stopping
from outrider.v1 import verify_pb2_grpc

SETTINGS = Colocated(VerifyArgs(threads=1, dtype="float32"), DraftArgs(listen="unix:/d"))


def test_the_words_of_both_services_are_told_apart() -> None:
    assert Colocated.parse(SETTINGS.to_argv()) == SETTINGS
    with pytest.raises(StartupError, match="`--`"):
        Colocated.parse(["--threads=1"])
    for words in (["--verify-address=unix:/v"], ["--describe"], ["--inspect=x"]):
        with pytest.raises(StartupError, match=f"{words[0].partition('=')[0]} is for a draft service that is apart"):
            Colocated.parse(["--", *words])


def test_files_of_either_half_are_read_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(colocated, "configure_logging", lambda name: None)
    monkeypatch.setattr(colocated, "importlib", None)
    verify, draft = f"--listen=unix:{tmp_path}/v", f"--listen=unix:{tmp_path}/d"
    for words in ([verify, "--admin-token-file=/nowhere", "--", draft], [verify, "--", draft, "--token-file=/nowhere"]):
        with pytest.raises(StartupError, match=r"cannot read --(admin-)?token-file"):
            colocated.main(words)


class Verify:
    """A verify service that serves until it is told to stop, or fails."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.failing = asyncio.Event()

    async def serve(self, args: Any, engine: Any, stop: Stopping, on_ready: Any) -> int:
        """Says at once that it is ready."""
        servicer: Any = verify_pb2_grpc.VerifyServiceServicer
        on_ready(servicer())
        failing = asyncio.create_task(self.failing.wait())
        await asyncio.wait([failing, asyncio.create_task(stop.asked.wait())], return_when=asyncio.FIRST_COMPLETED)
        failing.cancel()
        self.events.append("verify ended")
        return int(self.failing.is_set())


class Draft:
    """Serves as often as it is begun; ends with these codes, or errors, one after the other, then serves on."""

    def __init__(self, events: list[str], ends: list[int | Exception] | None = None) -> None:
        self.events = events
        self.ends = ends or []
        self.serves = asyncio.Event()
        self.loads = 0
        self.verify_address: tuple[str, ...] = ()

    def load(self, args: Any) -> str:
        """What is then served."""
        self.loads += 1
        return "loaded"

    async def serve(self, args: Any, loaded: str, stopping: Callable[[], Stopping], dial: Any) -> int:
        """Serves until it is told to stop."""
        assert loaded == "loaded"
        stop = stopping()
        self.verify_address = args.verify_address
        if self.ends:
            end = self.ends.pop(0)
            if isinstance(end, Exception):
                raise end
            return end
        self.serves.set()
        await stop.asked.wait()
        self.events.append("draft ended")
        return 0


async def run(verify: Verify, draft: Draft, monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Task[int], Any]:
    """The process's own part, and what a signal calls."""
    stops: list[Any] = []
    monkeypatch.setattr(colocated, "on_signals", stops.append)
    monkeypatch.setattr(colocated, "of_restarts", lambda: Backoff(first_s=0.0))
    task = asyncio.create_task(colocated._serve(SETTINGS, verify, None, draft, ["loaded"]))
    while not stops:  # noqa: ASYNC110
        await asyncio.sleep(0)
    return task, stops[0]


@pytest.mark.asyncio
async def test_told_to_stop_draft_leaves_before_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    draft = Draft(events)
    task, stop = await run(Verify(events), draft, monkeypatch)
    await draft.serves.wait()
    assert draft.verify_address == (SETTINGS.verify.listen,)  # what its lines are to name
    stop()
    assert await task == 0
    assert events == ["draft ended", "verify ended"]


@pytest.mark.asyncio
async def test_when_verify_fails_all_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    verify, draft = Verify(events), Draft(events)
    task, _ = await run(verify, draft, monkeypatch)
    await draft.serves.wait()
    verify.failing.set()
    assert await task == 1
    assert events == ["verify ended", "draft ended"]


@pytest.mark.asyncio
async def test_drafting_that_fails_begins_again_and_verify_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    draft = Draft(events, [1, RuntimeError("a fault"), 1])
    task, stop = await run(Verify(events), draft, monkeypatch)
    await draft.serves.wait()
    assert (events, draft.loads) == ([], 3)
    stop()
    assert await task == 0


@pytest.mark.asyncio
@pytest.mark.parametrize(("steady_s", "pauses"), [(60.0, [0.001, 0.002, 0.004]), (0.0, [0.001, 0.001, 0.001])])
async def test_pauses_grow_and_begin_anew_after_a_run_that_lasted(
    monkeypatch: pytest.MonkeyPatch, steady_s: float, pauses: list[float]
) -> None:
    monkeypatch.setattr(colocated, "of_restarts", lambda: Backoff(first_s=0.001, steady_s=steady_s, jitter=0.0))
    draft: Any = Draft([], [1, 1, 1, 0])
    with capture_logs() as logs:
        await colocated._keep_drafting(SETTINGS.draft, draft, ["loaded"], Stopping(), InMemoryServer())
    assert [line["pause_s"] for line in logs] == pauses


@pytest.mark.asyncio
async def test_pauses_grow_while_it_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colocated, "of_restarts", lambda: Backoff(first_s=0.001, steady_s=0.0, jitter=0.0))
    draft: Any = Draft([], [1])
    stopping = Stopping()
    loads: list[object] = []

    def load(args: object) -> object:
        loads.append(args)
        if len(loads) == 3:
            stopping.ask()
        raise StartupError("no memory")

    monkeypatch.setattr(draft, "load", load)
    with capture_logs() as logs:
        await colocated._keep_drafting(SETTINGS.draft, draft, ["loaded"], stopping, InMemoryServer())
    assert [line["pause_s"] for line in logs if "pause_s" in line] == [0.001, 0.002, 0.004]


@pytest.mark.asyncio
async def test_drafting_that_never_began_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    task, _ = await run(Verify(events), Draft(events, [StartupError("no such head")]), monkeypatch)
    with pytest.raises(StartupError, match="no such head"):
        await task
    assert events == ["verify ended"]


@pytest.mark.asyncio
async def test_no_more_is_begun_once_it_is_told_to_stop() -> None:
    stopping = Stopping()
    stopping.ask()
    draft: Any = Draft([], [1, 1])
    await colocated._keep_drafting(SETTINGS.draft, draft, ["loaded"], stopping, InMemoryServer())
    assert draft.ends == [1]
