"""What the event loop asks of the engine: plain records in one queue."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from outrider.errors import InvalidArgument, OutriderError
from outrider.thread_future import ThreadFuture
from outrider.v1 import verify_pb2
from verify_service.drafter import Drafter
from verify_service.proposals import Proposal
from verify_service.session import Session


@dataclass(frozen=True, slots=True)
class Submit:
    """The choices of one request are to be generated."""

    sessions: list[Session]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for these sessions any more."""

    sessions: list[Session]


@dataclass(frozen=True, slots=True)
class DrafterJoined:
    """A drafter enlisted."""

    drafter: Drafter


@dataclass(frozen=True, slots=True)
class DrafterLeft:
    """A drafter's stream ended."""

    drafter: Drafter


@dataclass(eq=False, slots=True)
class Arrived:
    """One proposal of a frame, its form checked, or what is wrong with that; None: its drafter has no such session."""

    session: int
    generation: int
    proposal_id: int
    proposal: Proposal | InvalidArgument | None


@dataclass(eq=False, slots=True)
class ProposalsArrived:
    """A frame of proposals. read: the last row of the drafter's ring that it has read, where it says so."""

    drafter: Drafter
    proposals: list[Arrived]
    read: int | None


@dataclass(frozen=True, slots=True)
class Released:
    """A drafter gives sessions up."""

    drafter: Drafter
    releases: list[verify_pb2.Release]


@dataclass(frozen=True, slots=True)
class Renewed:
    """The grammar of a parked session can go on, or cannot."""

    session: Session
    matcher: Future[LLMatcher]


@dataclass(frozen=True, slots=True)
class Ask:
    """Work that is to be done between two steps; `answer` gets what it returns or raises."""

    work: Callable[[], Any]
    answer: ThreadFuture[Any]

    def run(self) -> None:
        """Does the work and gives the answer."""
        try:
            self.answer.set(self.work())
        except OutriderError as error:
            self.answer.fail(error)


@dataclass(frozen=True, slots=True)
class Stop:
    """The thread is to end; sessions that still run get `error`."""

    error: OutriderError


Command = Submit | Cancel | DrafterJoined | DrafterLeft | ProposalsArrived | Released | Renewed | Ask | Stop


class Inbox:
    """Commands for the engine. Senders bound what they put in: calls by `num_calls`, frames by credits, questions by
    how many wait for their answers."""

    def __init__(self) -> None:
        self._commands: collections.deque[Command] = collections.deque()
        self._bell = threading.Lock()  # free: who waits is to wake up
        self._bell.acquire()
        self._ended: OutriderError | None = None  # nobody takes commands any more
        self._calls_put = 0  # by the event loop alone
        self._calls_taken = 0  # by whoever runs the engine alone

    @property
    def num_waiting(self) -> int:
        """Commands that wait."""
        return len(self._commands)

    @property
    def num_calls(self) -> int:
        """Requests, and requests given up, that the engine has not taken yet: those of one step, however long it is."""
        return self._calls_put - self._calls_taken

    @property
    def has_ended(self) -> bool:
        """Whether nobody may take what is put in now, or was just before."""
        return self._ended is not None

    def put(self, command: Command, *, wake: bool = True) -> None:
        """Hands a command over; any thread may. wake: whether to wake who waits.

        Who submits looks afterwards at `has_ended`.
        """
        self._calls_put += isinstance(command, (Submit, Cancel))
        self._commands.append(command)
        if self._ended is not None and isinstance(command, Ask):
            command.answer.fail(self._ended)
        if wake:
            self.wake()

    def end(self, error: OutriderError) -> list[Command]:
        """Nobody takes commands from here on: questions that are there, and come later, are answered so.

        Returns what was there.
        """
        self._ended = error
        commands = self.take()
        for command in commands:
            if isinstance(command, Ask):
                command.answer.fail(error)
        return commands

    def wake(self) -> None:
        """Wakes who waits, or the next one who will."""
        with contextlib.suppress(RuntimeError):  # it is free already
            self._bell.release()

    def wait(self, until_ns: int | None) -> None:
        """Waits to be woken, or until so many monotonic nanoseconds (None: for ever). Only the engine's thread may."""
        if until_ns is None:
            self._bell.acquire()
        else:
            self._bell.acquire(timeout=max(0.0, (until_ns - time.monotonic_ns()) / 1e9))

    def take(self) -> list[Command]:
        """All commands that are there."""
        commands: list[Command] = []
        with contextlib.suppress(IndexError):  # of `end`, in two threads at once
            for _ in range(len(self._commands)):
                commands.append(self._commands.popleft())
        for command in commands:
            self._calls_taken += isinstance(command, (Submit, Cancel))
        return commands
