"""Verify services that are replaced by unlike ones, or differ from the start: what counts is who serves now."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer

from gateway.replicas import ReplicaSet
from outrider.errors import InvalidArgument, ResourceExhausted
from tests.gateway.fakes import FAST_PROBE, FakeVerify, RunningGateway, running, serving
from tests.polling import until, until_async

USER: Any = [{"role": "user", "content": "Hi!"}]
SMALL: dict[str, Any] = {"max_running": 2, "max_queued": 1, "max_choices": 3, "max_total_tokens": 600}
LARGE: dict[str, Any] = {"max_running": 16, "max_queued": 64, "max_choices": 80, "max_total_tokens": 8192}


@pytest.fixture
def one(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> Generator[RunningGateway]:
    """A gateway in front of one small replica."""
    with running({}, lambda: [FakeVerify(folder, tokenizer.get_vocab_size(), **SMALL)], tmp_path) as gateway:
        yield gateway


def restart(gateway: RunningGateway, **facts: Any) -> None:
    """Another process, of these facts, serves at the address; returns when the gateway has heard of it."""
    (verify,) = gateway.verify
    for name, fact in {"boot_id": f"{verify.boot_id}+", **facts}.items():
        setattr(verify, name, fact)
    replicas = gateway.app.state.gateway.replicas
    until(lambda: replicas.infos[0][1].boot_id == verify.boot_id, "the gateway does not hear of it")


def refusal(reply: httpx.Response) -> tuple[int, str, str]:
    """The status of a reply, and the code and the field that it names."""
    error = reply.json()["error"]
    return reply.status_code, error["code"], error["param"]


def test_an_answer_ends_before_the_stop_token_of_the_replica_that_gave_it(
    one: RunningGateway, tokenizer: Tokenizer
) -> None:
    """Whether the gateway has heard of another process or not."""
    (verify,) = one.verify
    said, end = tokenizer.encode("ok!", add_special_tokens=False).ids, tokenizer.encode("!").ids[-1]
    assert said[-1] == end
    verify.say = lambda request, choice: said
    for eos, text, reason in [(2, "ok!", "length"), (end, "ok", "stop"), (2, "ok!", "length")]:
        verify.eos = eos
        native = httpx.post(f"{one.url}/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 3}}).json()
        assert (native["text"], native["meta_info"]["finish_reason"]["type"]) == (text, reason)
        (choice,) = httpx.post(f"{one.url}/v1/completions", json={"prompt": "a", "max_tokens": 3}).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, reason)


def test_limits_are_those_of_the_process_that_serves_now(one: RunningGateway) -> None:
    with httpx.Client(base_url=one.url) as http:

        def chat(n: int, max_tokens: int) -> httpx.Response:
            return http.post("/v1/chat/completions", json={"messages": USER, "n": n, "max_tokens": max_tokens})

        def prompts() -> httpx.Response:
            return http.post("/v1/completions", json={"prompt": ["a"] * 6})

        for facts, fits in [({}, False), (LARGE, True), (SMALL, False)]:
            restart(one, **facts)
            replies = [chat(4, 10), chat(2, 400), prompts()]
            if fits:
                assert [reply.status_code for reply in replies] == [200] * 3
            else:
                assert [refusal(reply) for reply in replies] == [
                    (400, "integer_above_max_value", "n"), (400, "integer_above_max_value", "n"),
                    (400, "array_above_max_length", "prompt"),
                ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"messages": USER, "n": 3}, "n"),
        ("/generate", {"text": "a", "sampling_params": {"n": 3}}, "sampling_params.n"),
    ],
)
def test_a_limit_that_the_gateway_has_not_heard_of_is_told_in_the_callers_words(
    one: RunningGateway, path: str, body: dict[str, Any], field: str
) -> None:
    one.verify[0].refuse = InvalidArgument("num_choices is 3; it must be from 1 to 2", field="num_choices")
    reply = httpx.post(one.url + path, json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["message"]) == (field, f"{field} is 3; it must be from 1 to 2")


def test_what_is_told_of_the_model_is_of_the_process_that_serves_now(one: RunningGateway, folder: Path) -> None:
    restart(one, folder=Path("/models/other"), dtype="bfloat16")
    with httpx.Client(base_url=one.url) as http:
        info = http.get("/get_model_info").json()
        assert (info["model_path"], info["dtype"]) == ("/models/other", "bfloat16")
        assert http.get("/get_server_info").json()["model_path"] == "/models/other"
        (card,) = http.get("/v1/models").json()["data"]
        assert (card["id"], card["root"]) == (folder.name, "/models/other")
        for name in (folder.name, str(folder), "other", "/models/other", "default"):
            assert http.post("/v1/completions", json={"model": name, "prompt": "a"}).status_code == 200


@pytest.mark.parametrize("order", [1, -1])
def test_the_largest_replica_says_what_may_be_asked_and_gets_it(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path, order: int
) -> None:
    size = tokenizer.get_vocab_size()
    small, large = FakeVerify(folder, size, boot_id="s", **SMALL), FakeVerify(folder, size, boot_id="l", **LARGE)
    small.refuse = ResourceExhausted("it is full")  # for prompts that come to it
    with running({}, lambda: [small, large][::order], tmp_path) as gateway:
        until(lambda: len(gateway.app.state.gateway.replicas.infos) == 2, "not both are found")
        small.requests.clear()
        for _ in range(3):
            reply = httpx.post(f"{gateway.url}/v1/chat/completions", json={"messages": USER, "n": 4})
            assert len(reply.json()["choices"]) == 4
        assert [len(small.requests), len(large.requests)] == [0, 3]
        reply = httpx.post(f"{gateway.url}/v1/completions", json={"prompt": ["a"] * 6})
        assert len(reply.json()["choices"]) == 6


@pytest.mark.asyncio
async def test_the_log_warns_of_each_process_that_serves_another_model(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    verify = FakeVerify(folder, tokenizer.get_vocab_size())
    async with serving(verify, f"unix:{tmp_path}/0") as address:
        replicas = ReplicaSet([address], FAST_PROBE)
        with capture_logs() as logs:
            await replicas.start()
            try:
                for facts in ({}, {"dtype": "bfloat16", "folder": Path("/other")}, {"dtype": "float32"}):
                    for name, fact in {"boot_id": f"{verify.boot_id}+", **facts}.items():
                        setattr(verify, name, fact)
                    await until_async(
                        lambda: [info.boot_id for _, info in replicas.infos] == [verify.boot_id], "not asked again"
                    )
                (replica,) = replicas.serving
                assert await replicas.prober.probe(replica)
            finally:
                await replicas.close()
    differs = [log["differs"] for log in logs if "another model" in log["event"]]
    path = f"model_path is '/other', not {str(folder)!r}"
    assert differs == [f"{path}; dtype is 'bfloat16', not 'float32'", path]
