"""What children print, over a real pipe."""

from __future__ import annotations

import os

import pytest

from outrider import child_output
from outrider.child_output import ChildOutput


@pytest.mark.asyncio
async def test_a_pipe_that_ends_as_the_time_for_it_does_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing it twice would close another's descriptor of the same number."""
    monkeypatch.setattr(child_output, "_DRAIN_S", 0.0)  # over in the loop's next turn, which sees the end as well
    output = ChildOutput(lambda data: None)
    with output.opened():
        pass
    await output.drain()


@pytest.mark.asyncio
async def test_what_was_printed_is_passed_on_and_its_last_lines_are_kept() -> None:
    printed: list[bytes] = []
    output = ChildOutput(printed.append)
    with output.opened() as write_end:
        os.write(write_end, b"10 %\r20 %\nthe reason")
    await output.drain()
    assert b"".join(printed) == b"10 %\r20 %\nthe reason"
    assert output.last_lines() == ["20 %", "the reason"]
