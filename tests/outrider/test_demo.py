from __future__ import annotations

import io

import pytest

from outrider import demo
from outrider.chat import Painter
from outrider.launcher import Served
from tests.outrider.conftest import FakeGateway


def shown(fake: FakeGateway, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """What the painter got, and what was printed."""
    out = io.StringIO()
    demo.show(Served(fake.url, "a-model", lambda: None), Painter(out))
    return out.getvalue(), capsys.readouterr().out


def test_the_same_prompt_with_and_without_speculation(
    fake_gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    painted, printed = shown(fake_gateway, capsys)
    assert painted == "Hello you"
    assert "accept length 3.00" in printed
    assert "accept length 1.00" in printed
    assert "Both answers are identical" in printed
    _, drafted, plain = fake_gateway.requests
    assert (drafted["speculative"]["enabled"], plain["speculative"]["enabled"]) == (True, False)
    assert drafted["messages"] == plain["messages"]
    assert drafted["temperature"] == plain["temperature"] == 0.0


def test_answers_that_differ_are_not_hidden(fake_gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    fake_gateway.plain_pieces = [("Bye", "target")]
    assert "DIFFER" in shown(fake_gateway, capsys)[1]
