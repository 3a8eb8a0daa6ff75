from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider import env
from outrider.errors import StartupError


def test_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", "/data/outrider")
    assert env.home() == Path("/data/outrider")
    monkeypatch.delenv("OUTRIDER_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert env.home() == Path("/cache/outrider")


@pytest.mark.parametrize(("value", "meaning"), [("1", True), ("off", False), ("TRUE", True), ("", True)])
def test_switches(value: str, meaning: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CPU_KERNEL", value)
    assert env.cpu_kernel() is meaning


@pytest.mark.parametrize(
    ("name", "read"), [("OUTRIDER_CPU_KERNEL", env.cpu_kernel), ("OUTRIDER_LOG_LEVEL", env.log_level)]
)
def test_nonsense_is_refused_by_name(name: str, read: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "perhaps")
    assert callable(read)
    with pytest.raises(StartupError, match=name):
        read()


@pytest.mark.parametrize("name", ["OUTRIDER_CPU_KERNEL", "OUTRIDER_ENABLE_SPEC_V2", "SGLANG_NGRAM_FORCE_GREEDY_VERIFY"])
def test_a_service_is_not_loaded_with_nonsense(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "perhaps")
    with pytest.raises(StartupError, match=name):
        env.check()


def test_a_switch_says_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CPU_KERNEL", "2")
    with pytest.raises(StartupError, match="OUTRIDER_CPU_KERNEL is '2'; it must be 1 or 0"):
        env.cpu_kernel()


def test_sglangs_name_for_early_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_ENABLE_SPEC_V2", raising=False)
    monkeypatch.setenv("SGLANG_ENABLE_SPEC_V2", "true")
    assert env.early_proposals()
    monkeypatch.setenv("OUTRIDER_ENABLE_SPEC_V2", "0")
    assert not env.early_proposals()


def test_sglangs_name_for_greedy_verify_of_n_grams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_NGRAM_FORCE_GREEDY_VERIFY", raising=False)
    assert not env.ngram_force_greedy_verify()
    monkeypatch.setenv("SGLANG_NGRAM_FORCE_GREEDY_VERIFY", "true")
    assert env.ngram_force_greedy_verify()
    monkeypatch.setenv("OUTRIDER_NGRAM_FORCE_GREEDY_VERIFY", "0")
    assert not env.ngram_force_greedy_verify()


def test_early_proposals_may_be_left_to_what_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_ENABLE_SPEC_V2", "auto")
    assert env.early_proposals() is None
    monkeypatch.setenv("OUTRIDER_ENABLE_SPEC_V2", "maybe")
    with pytest.raises(StartupError, match="OUTRIDER_ENABLE_SPEC_V2 is 'maybe'; it must be 1, 0 or auto"):
        env.early_proposals()


def test_a_child_knows_its_parent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_PARENT_PID", env.for_child()["OUTRIDER_PARENT_PID"])
    assert env.take_parent_pid() == os.getpid()
    assert env.take_parent_pid() is None


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", "~nosuchuser/x")
    with pytest.raises(StartupError, match="OUTRIDER_HOME is '~nosuchuser/x'"):
        env.home()
    for name in ("OUTRIDER_HOME", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)  # of whom the system knows nothing
    with pytest.raises(StartupError, match="neither OUTRIDER_HOME nor XDG_CACHE_HOME is set"):
        env.home()


def test_an_empty_log_level_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_LOG_LEVEL", "")
    assert env.log_level() == "info"
