"""Steps that change hands between their own thread and the one that brings commands: none lost, never two."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import Unavailable
from outrider.thread_future import ThreadFuture
from verify_service.commands import Ask, Command, Inbox, Stop
from verify_service.turns import Compute, Lending, Pause, Settle, Steps, Turns, Wait

FOREVER = Wait(None)
SHORT, LONG, NEVER = Compute(1.0), Compute(99.0), Compute(math.inf)
MOST_MS = 20.0
STOP = Stop(Unavailable("enough"))


class WatchedInbox(Inbox):
    """An inbox that tells when the thread has begun to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waited = threading.Event()
        self.num_waits = 0

    def wait(self, until_ns: int | None) -> None:
        self.num_waits += 1
        self.waited.set()
        super().wait(until_ns)


@dataclass
class Script:
    """Steps that pause where they are told to, and note what they got and on which thread."""

    turns: Turns = field(init=False)
    inbox: WatchedInbox = field(default_factory=WatchedInbox)
    got: list[Command] = field(default_factory=list)
    ran_by: list[tuple[Pause, int]] = field(default_factory=list)  # what followed a pause
    paused: threading.Condition = field(default_factory=threading.Condition)
    at: Pause | None = None
    running: bool = False
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def begin(self, after: Callable[[Command], list[Pause]], most_ms: float = MOST_MS) -> threading.Thread:
        """`after` gives the pauses that a command leads to; then the steps wait for the next one, until a Stop."""

        def steps() -> Steps:
            while True:
                commands = yield from self._pause(FOREVER)
                self.got += commands
                for command in commands:
                    for pause in after(command):
                        more = yield from self._pause(pause)
                        assert not more or not isinstance(pause, Compute)
                        self.got += more
                if any(isinstance(command, Stop) for command in self.got):
                    return

        self.turns = Turns(steps(), self.inbox, Lending(most_ms, self.loop.call_later))
        self.failures: list[BaseException] = []
        self.looping = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.looping.start()
        thread = threading.Thread(target=self._run)
        thread.start()
        assert self.inbox.waited.wait(30)  # by then nobody has the turn
        return thread

    def bring(self, command: Command) -> None:
        """Brings a command on the event loop, as a frame does."""
        self._on_loop(lambda: self.turns.bring(command))

    def settled(self) -> None:
        """Says on the event loop that what drafters were told is on its way."""
        self._on_loop(self.turns.settled)

    def _on_loop(self, call: Callable[[], None]) -> None:
        done: concurrent.futures.Future[None] = concurrent.futures.Future()

        def run() -> None:
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        done.result(30)

    def close(self) -> None:
        """Ends the event loop."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.looping.join(30)
        self.loop.close()

    def _run(self) -> None:
        try:
            self.turns.run()
        except BaseException as error:
            self.failures.append(error)

    def _pause(self, pause: Pause) -> Generator[Pause, list[Command], list[Command]]:
        self.running = False
        with self.paused:
            self.at = pause
            self.paused.notify_all()
        commands = yield pause
        assert not self.running
        self.running = True
        self.ran_by.append((pause, threading.get_ident()))
        return commands

    def until(self, holds: Callable[[], bool]) -> None:
        """Waits for a pause at which `holds()`."""
        with self.paused:
            assert self.paused.wait_for(holds, timeout=30)

    def threads_after(self, pause: Pause) -> set[int]:
        """The threads that took the steps on from such a pause."""
        return {thread for at, thread in self.ran_by if at is pause}


def note(turn: int) -> Ask:
    """A command that can be told from others."""

    def work() -> None:
        raise AssertionError(f"nobody obeys note {turn}")

    return Ask(work, cast("ThreadFuture[None]", None))


def end(script: Script, thread: threading.Thread) -> None:
    """Stops the steps, which have failed in nothing."""
    script.inbox.put(STOP)
    thread.join(30)
    assert not thread.is_alive()
    assert not script.failures
    script.close()


@pytest.mark.parametrize(
    ("pause", "most_ms", "lent"),
    [(SHORT, MOST_MS, True), (LONG, MOST_MS, False), (NEVER, MOST_MS, False), (SHORT, 0.0, False)],
)
def test_a_short_step_is_run_by_who_brings_what_it_waited_for(pause: Compute, most_ms: float, lent: bool) -> None:
    script = Script()
    thread = script.begin(lambda command: [] if isinstance(command, Stop) else [pause], most_ms)
    script.bring(note(1))
    script.until(lambda: script.at is FOREVER and len(script.threads_after(pause)) == 1)
    assert script.threads_after(pause) == {script.looping.ident if lent else thread.ident}
    end(script, thread)


def test_of_steps_that_follow_one_another_the_first_alone_is_lent() -> None:
    """The event loop would else decode, and nobody would hear of it."""
    second = Compute(2.0)
    script = Script()
    thread = script.begin(lambda command: [] if isinstance(command, Stop) else [SHORT, second, second])
    script.bring(note(1))
    script.until(lambda: script.at is FOREVER and len(script.ran_by) > 3)
    assert script.threads_after(SHORT) == {script.looping.ident}
    assert script.threads_after(second) == {thread.ident}
    end(script, thread)


def test_what_can_wait_is_done_once_drafters_were_told_on_the_same_thread() -> None:
    now_ns = time.monotonic_ns()
    settle = Settle(now_ns + 60_000_000_000, now_ns + 90_000_000_000)
    script = Script()
    thread = script.begin(lambda command: [] if isinstance(command, Stop) else [SHORT, settle])
    script.settled()  # nothing is to settle
    script.bring(note(1))
    assert script.at is settle
    script.settled()
    assert script.threads_after(settle) == {script.looping.ident}
    assert script.at is FOREVER
    end(script, thread)


@pytest.mark.parametrize("pause_ms", [0, 5])
def test_a_wait_that_ends_is_noticed_though_the_thread_slept_for_longer(pause_ms: int) -> None:
    """The thread slept until a command came, for ever; then the event loop left a deadline behind."""
    waits: list[Wait] = []

    def after(command: Command) -> list[Pause]:
        waits.append(Wait(time.monotonic_ns() + pause_ms * 1_000_000))
        return [] if isinstance(command, Stop) else [SHORT, waits[-1]]

    script = Script()
    thread = script.begin(after)
    script.bring(note(1))
    script.until(lambda: script.at is FOREVER and len(script.ran_by) >= 3)
    assert len(script.threads_after(waits[0])) == 1
    end(script, thread)


def test_a_bell_that_rings_for_nothing_makes_the_thread_forget_no_wait_of_its_own() -> None:
    waits: list[Wait] = []

    def after(command: Command) -> list[Pause]:
        waits.append(Wait(time.monotonic_ns() + 20_000_000))
        return [] if isinstance(command, Stop) else [waits[-1]]

    script = Script()
    thread = script.begin(after)
    script.inbox.put(note(1))
    script.until(lambda: bool(waits) and (script.at is waits[0] or bool(script.threads_after(waits[0]))))
    script.inbox.wake()
    script.until(lambda: script.at is FOREVER)
    assert script.threads_after(waits[0]) == {thread.ident}
    end(script, thread)


def test_the_thread_sleeps_while_the_event_loop_runs_steps() -> None:
    """Waits that nobody waits out are no reason to wake up."""
    script = Script()

    def after(command: Command) -> list[Pause]:
        in_a_minute = Wait(time.monotonic_ns() + 60_000_000_000)
        return [] if isinstance(command, Stop) else [SHORT, in_a_minute]

    thread = script.begin(after)
    slept = script.inbox.num_waits
    for turn in range(20):
        script.bring(note(turn))
    assert script.inbox.num_waits == slept
    assert {by for _, by in script.ran_by} == {script.looping.ident}
    end(script, thread)


@pytest.mark.parametrize("brought", [True, False])
def test_an_error_ends_the_thread_whoever_ran_into_it(brought: bool) -> None:
    script = Script()

    def fail(command: Command) -> list[Pause]:
        raise ValueError("no such step")

    thread = script.begin(fail)
    (script.bring if brought else script.inbox.put)(note(1))
    thread.join(30)
    assert [str(error) for error in script.failures] == ["no such step"]
    script.bring(note(2))  # nobody is there: it stays where it is
    assert script.inbox.num_waiting == 1
    script.close()


def test_a_stop_that_is_met_on_the_event_loop_ends_the_thread() -> None:
    script = Script()
    thread = script.begin(lambda command: [SHORT])
    script.bring(STOP)
    thread.join(30)
    assert not thread.is_alive()
    assert not script.failures
    script.close()


PAUSES = st.sampled_from(["short", "long", "never", "wait", "settle"])


@given(plans=st.lists(st.tuples(st.booleans(), st.booleans(), st.lists(PAUSES, max_size=4)), max_size=12))
def test_every_command_arrives_once_and_in_order_however_turns_fall(
    plans: list[tuple[bool, bool, list[str]]],
) -> None:
    """Brought or put in, with waits, long and short steps between, and drafters told in time or not."""

    def pause_of(kind: str) -> Pause:
        now_ns = time.monotonic_ns()
        return {
            "short": SHORT, "long": LONG, "never": NEVER, "wait": Wait(now_ns + 100_000),
            "settle": Settle(now_ns + 100_000, now_ns + 200_000),
        }[kind]  # fmt: skip

    commands = [note(turn) for turn in range(len(plans))]
    leads_to = {id(command): kinds for command, (_, _, kinds) in zip(commands, plans, strict=True)}
    script = Script()
    thread = script.begin(lambda command: [pause_of(kind) for kind in leads_to.get(id(command), [])])
    for command, (is_brought, settles, _) in zip(commands, plans, strict=True):
        (script.bring if is_brought else script.inbox.put)(command)
        if settles:
            script.settled()
    end(script, thread)
    assert script.got == [*commands, STOP]
