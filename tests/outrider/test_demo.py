from __future__ import annotations

import io
from pathlib import Path

import pytest

from outrider import demo
from outrider.chat import Painter
from outrider.launcher import Served
from tests.outrider.conftest import FakeGateway


def shown(fake: FakeGateway, capsys: pytest.CaptureFixture[str], *, equal: bool = True) -> tuple[str, str]:
    """What the painter got, and what was printed."""
    out = io.StringIO()
    assert demo.show(Served(fake.url, "a-model", lambda: None), Painter(out)) is equal
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
    assert "DIFFER" in shown(fake_gateway, capsys, equal=False)[1]


def test_kernels_that_cannot_be_had_are_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CPU_KERNEL", "0")
    assert demo.kernels_fault() == "OUTRIDER_CPU_KERNEL is off"
    monkeypatch.setenv("OUTRIDER_CPU_KERNEL", "1")
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'math.h: No such file' >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("PATH", str(tmp_path))
    fault = demo.kernels_fault() or ""
    assert "math.h: No such file" in fault
    assert "apt install gcc libc6-dev" in fault
