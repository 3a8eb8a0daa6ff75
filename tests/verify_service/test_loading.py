"""What a process cannot load ends it in one line that names the flags."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from engine.runner import ModelRunner
from outrider.args import VerifyArgs
from outrider.errors import StartupError
from tests.e2e.small_model import write_small_model
from verify_service import app
from verify_service.loading import load_model


def test_small_limits(tmp_path: Path) -> None:
    write_small_model(tmp_path)
    common: dict[str, Any] = {"model_path": str(tmp_path), "device": "cpu", "threads": 1}
    args = VerifyArgs(**common, max_running_requests=1, max_verify_nodes=8, chunked_prefill_size=16, page_size=16)
    assert load_model(args).sizes.chunk == 16
    with pytest.raises(StartupError, match="--max-total-tokens is 10; it must be at least a page, --page-size"):
        load_model(VerifyArgs(**common, max_total_tokens=10, page_size=16))


def test_the_context_that_is_asked_for_decides_on_long_factors(tmp_path: Path) -> None:
    write_small_model(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    half = raw["hidden_size"] // raw["num_attention_heads"] // 2
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * half, "long_factor": [3.0] * half}
    path.write_text(json.dumps(raw | {"rope_parameters": rope, "original_max_position_embeddings": 64}))
    common: dict[str, Any] = {"model_path": str(tmp_path), "device": "cpu", "threads": 1, "max_running_requests": 1}
    for length, is_long in ((None, False), (64, False), (100, True)):
        loaded = load_model(VerifyArgs(**common, context_length=length))
        assert isinstance(loaded.runner, ModelRunner)
        assert (loaded.sizes.context_length, loaded.runner.config.is_long) == (length or 64, is_long)


def test_a_core_that_there_is_not_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--core is 100000"):
        load_model(VerifyArgs(model_path=str(tmp_path / "nowhere"), core=100_000))


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"token_file": ""}, "cannot read --token-file"),
        ({"admin_token_file": "/nowhere"}, "cannot read --admin-token-file"),
        ({"ssl_certfile": "/nowhere", "ssl_keyfile": "/nowhere"}, "cannot read --ssl-certfile"),
        ({}, "OUTRIDER_NGRAM_FORCE_GREEDY_VERIFY is 'maybe'"),
    ],
)
def test_files_and_variables_are_read_before_the_model(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, str], complaint: str
) -> None:
    monkeypatch.setattr(app, "configure_logging", lambda name: None)
    monkeypatch.setattr(app, "load_model", None)
    if not flags:
        monkeypatch.setenv("OUTRIDER_NGRAM_FORCE_GREEDY_VERIFY", "maybe")
    with pytest.raises(StartupError, match=complaint):
        app.main(VerifyArgs(listen="127.0.0.1:0", **flags))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("limit", ["max_running_requests", "max_verify_nodes"])
def test_limits_that_no_memory_holds(tmp_path: Path, limit: str) -> None:
    write_small_model(tmp_path)
    huge: dict[str, Any] = {limit: 2**31 - 1}
    args = VerifyArgs(model_path=str(tmp_path), device="cpu", threads=1, max_total_tokens=64, **huge)
    with pytest.raises(StartupError, match=f"no memory for .*--{limit.replace('_', '-')} 2147483647"):
        load_model(args)


def test_a_pool_that_the_system_gives_no_memory_for(tmp_path: Path) -> None:
    write_small_model(tmp_path)
    args = VerifyArgs(model_path=str(tmp_path), device="cpu", threads=1, max_total_tokens=2**21)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + 2**28, limits[1]))  # the pool takes a little more than 2**30
    try:
        with pytest.raises(StartupError, match=r"no memory for --max-total-tokens 2097152, .* 514 MiB at once: Cannot"):
            load_model(args)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
