"""Calls beside the engine: what fails for one, and what begins when the engine has ended."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider.errors import Internal, Unavailable
from outrider.v1 import verify_pb2
from verify_service.calls import Calls
from verify_service.commands import Cancel, Command, Inbox, Submit


class Made:
    """Calls over an inbox that nobody reads, each with a session of its own."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.sessions: list[Any] = []
        totals = SimpleNamespace(finished=Counter(), began=lambda session: None, ended=lambda finish: None)
        target = SimpleNamespace(boot_id="boot", model=SimpleNamespace(numerics_id="n"))
        self.calls = Calls(
            cast("Any", self), self.inbox, cast("Any", target), cast("Any", totals), tracing=None, max_untaken=10
        )

    def build(self, request: verify_pb2.GenerateRequest) -> list[Any]:
        """A request's sessions."""
        session = SimpleNamespace(
            session_id=len(self.sessions), prompt_len=1, output_len=0, arrived_ns=0, seed=1, cached_len=0
        )
        self.sessions.append(session)
        return [session]


@pytest.mark.asyncio
async def test_a_call_that_cannot_be_told_costs_no_other_its_tokens() -> None:
    made, told, heard = Made(), [], []

    def fail(response: verify_pb2.GenerateResponse | Exception) -> None:
        told.append(response)
        raise KeyError(7)

    await made.calls.begin(verify_pb2.GenerateRequest(), (), fail)
    await made.calls.begin(verify_pb2.GenerateRequest(), (), heard.append)
    for token in (5, 6):
        made.calls.deliver([(session, verify_pb2.GenerateResponse(tokens=[token])) for session in made.sessions])
    assert [list(response.tokens) for response in heard] == [[5], [6]]
    assert [type(response) for response in told] == [verify_pb2.GenerateResponse, Internal]
    assert [command for command in made.inbox.take() if isinstance(command, Cancel)] == [Cancel([made.sessions[0]])]


@pytest.mark.asyncio
async def test_a_call_that_begins_after_the_engines_end_is_refused() -> None:
    made, heard = Made(), []
    made.inbox.end(Unavailable("the engine failed"))
    with pytest.raises(Unavailable, match="shutting down"):
        await made.calls.begin(verify_pb2.GenerateRequest(), (), heard.append)
    assert not heard
    assert made.calls.idle.is_set()


@pytest.mark.asyncio
async def test_what_is_put_in_at_the_engines_end_takes_no_call_away_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made()
    await made.calls.begin(verify_pb2.GenerateRequest(), (), lambda _: None)
    take = made.inbox.take

    def put_before() -> list[Command]:  # the engine has said that it ends, and not yet taken what is there
        made.inbox.put(Cancel([]))
        return take()

    monkeypatch.setattr(made.inbox, "take", put_before)
    assert made.inbox.end(Unavailable("the engine failed")) == [Submit(made.sessions), Cancel([])]
