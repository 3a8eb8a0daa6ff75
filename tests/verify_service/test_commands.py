"""The queue of commands, where it ends."""

from __future__ import annotations

from collections import deque

from outrider.errors import Unavailable
from verify_service.commands import Command, Inbox, Submit


def test_two_may_end_it_at_once() -> None:
    inbox, error = Inbox(), Unavailable("bye")
    first, second = Submit([]), Submit([])

    class Meanwhile(deque[Command]):
        def popleft(self) -> Command:
            while len(self):
                others.append(super().popleft())
            return super().popleft()

    others: list[Command] = []
    inbox._commands = Meanwhile([first, second])
    assert inbox.end(error) == []
    assert others == [first, second]
