"""What is told beside answers: ids of text, metrics, limits in headers, caches."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from gateway import offload, tokenization
from gateway.replicas import ReplicaSet
from outrider.errors import InvalidArgument, OutriderError, ResourceExhausted, Unauthenticated, Unavailable
from tests.gateway.fakes import FakeVerify, RunningGateway, running
from tests.polling import until

USER: Any = [{"role": "user", "content": "Hi!"}]


@pytest.fixture(scope="module")
def metered(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningGateway]:
    """A gateway that counts its callers' tokens, and gives them back slowly."""
    with running(
        {"tokens_per_minute": 60}, lambda: [FakeVerify(folder, vocab_size=410)], tmp_path_factory.mktemp("metered")
    ) as gateway:
        yield gateway


def test_loads_are_what_replicas_last_said_each_in_its_place(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks often learns nothing late, and takes no replica down that is slow just now."""
    fakes = [FakeVerify(folder, vocab_size=410, boot_id=str(running), running=running) for running in (1, 2)]
    with running({}, lambda: fakes, tmp_path) as gateway:
        while len(gateway.app.state.gateway.replicas.infos) < len(fakes):
            time.sleep(0)
        monkeypatch.setattr(ReplicaSet, "ask_all", pytest.fail)
        fakes[0].is_late = True
        loads = httpx.get(f"{gateway.url}/v1/loads").json()["loads"]
        assert [(load["dp_rank"], load["num_running_reqs"]) for load in loads] == [(0, 1), (1, 2)]


def test_tokenize_and_back(gateway: RunningGateway, tokenizer: Tokenizer) -> None:
    with httpx.Client(base_url=gateway.url) as http:
        made = http.post("/tokenize", json={"prompt": "<|im_end|>Hi, 東", "return_token_strs": True}).json()
        assert made["tokens"] == tokenizer.encode("<|im_end|>Hi, 東").ids
        assert (made["count"], made["max_model_len"]) == (len(made["tokens"]), 512)
        assert made["token_strs"][0] == "<|im_end|>"
        plain = http.post("/tokenize", json={"prompt": "<|im_end|>Hi", "add_special_tokens": False}).json()
        assert 2 not in plain["tokens"]
        rows = http.post("/tokenize", json={"prompt": ["a", "bb"]}).json()
        assert (rows["tokens"], rows["count"]) == ([[tokenizer.token_to_id("a")], rows["tokens"][1]], [1, 2])
        assert "token_strs" not in rows
        rows = http.post("/tokenize", json={"prompt": ["a", "bb"], "return_token_strs": True}).json()
        assert ["".join(row) for row in rows["token_strs"]] == ["a", "bb"]
        assert [len(row) for row in rows["token_strs"]] == rows["count"]
        chat = http.post("/tokenize", json={"messages": USER}).json()["tokens"]
        text = http.post("/detokenize", json={"tokens": chat}).json()
        assert text["prompt"] == text["text"] == "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
        back = http.post("/detokenize", json={"tokens": [made["tokens"], []], "skip_special_tokens": True}).json()
        assert back["text"] == ["Hi, 東", ""]
        for path, body, param in [
            ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
            ("/tokenize", {"messages": USER, "add_generation_prompt": False}, "add_generation_prompt"),
            ("/tokenize", {"messages": USER, "add_special_tokens": True}, "add_special_tokens"),
            ("/tokenize", {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
            ("/tokenize", {"prompt": ["a"], "continue_final_message": True}, "continue_final_message"),
            ("/tokenize", {"messages": USER, "chat_template": "{{ 1 }}"}, "chat_template"),
            ("/tokenize", {"prompt": "a", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
            ("/detokenize", {"tokens": [1, [2]]}, "tokens"), ("/detokenize", {"tokens": [10**6]}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ]:  # fmt: skip
            reply = http.post(path, json=body)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_text_of_many_ids_is_made_beside_the_event_loop(
    gateway: RunningGateway, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may ask to be told of its own long prompt."""

    async def here() -> threading.Thread:
        return threading.current_thread()

    def noting(work: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            threads.add(threading.current_thread())
            return work(*args, **kwargs)

        return noted

    loop, threads = gateway.loop.run(here()), set[threading.Thread]()
    codec = gateway.app.state.gateway.ready().codec
    monkeypatch.setattr(offload, "INLINE_BYTES", 16 * offload.ID_COST)
    monkeypatch.setattr(tokenization, "_PIECE", 100)
    monkeypatch.setattr(codec, "piece", noting(codec.piece))
    with httpx.Client(base_url=gateway.url) as http:
        for prompt in ("Hi, 東!" * 50, ["Hi!" * 50, "", "a"]):
            made = http.post("/tokenize", json={"prompt": prompt, "return_token_strs": True}).json()
            texts, rows = ([prompt], [made["tokens"]]) if isinstance(prompt, str) else (prompt, made["tokens"])
            assert rows == [tokenizer.encode(text).ids for text in texts]
        assert threads
        assert loop not in threads
        threads.clear()
        monkeypatch.setattr(codec, "detokenizer", noting(codec.detokenizer))
        ids = tokenizer.encode("Hi!" * 50).ids
        body = {"prompt": [ids, [5]], "echo": True, "max_tokens": 0}
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "Hi!" * 50
    assert threads - {loop}  # an answer's own tokens come one at a time, and become text where they come


def test_metrics_and_cache(gateway: RunningGateway) -> None:
    with httpx.Client(base_url=gateway.url) as http:
        before = _metrics(http)
        assert http.post("/v1/chat/completions", json={"messages": USER, "odd": 1}).status_code == 200
        assert http.post("/v1/chat/completions", json={"messages": []}).status_code == 400
        after = _metrics(http)

        def grown(name: str) -> float:
            return after[name] - before.get(name, 0)

        answered = '{code="200",finish_reason="stop",route="/v1/chat/completions"}'
        assert grown("outrider_requests_total" + answered) == 1
        assert grown("outrider_unknown_fields_total") == 1
        tokens = grown("outrider_generation_tokens_total")
        assert tokens == grown("outrider_request_generation_tokens_sum") > 10
        assert grown("outrider_time_to_first_token_seconds_count") == 1
        assert grown("outrider_inter_token_latency_seconds_count") == grown("outrider_spec_verify_calls_total")
        accepted = grown("outrider_spec_accepted_tokens_total")
        positions = [grown(name) for name in after if "per_position" in name]
        assert (sum(positions), positions) == (accepted, sorted(positions, reverse=True))
        (up,) = (value for name, value in after.items() if name.startswith("outrider_verify_up"))
        assert up == 1
        assert all(name.startswith(("outrider_", "process_")) for name in after)
        assert http.post("/flush_cache").json() == {"success": True, "freed_pages": 7}
        assert gateway.verify[0].flushed == 1


def test_what_is_refused_or_has_two_paths_is_counted_by_its_path(folder: Path, tmp_path: Path) -> None:
    args = {"api_key": ("sk",), "requests_per_minute": 1}
    with (
        running(args, lambda: [FakeVerify(folder, vocab_size=410)], tmp_path) as gateway,
        httpx.Client(base_url=gateway.url, headers={"authorization": "Bearer sk"}) as client,
    ):
        for _ in range(2):
            client.post("/v1/chat/completions", json={"messages": USER})
        client.get("/v1/models/default", headers={"authorization": "Bearer another"})
        for path in ("/get_server_info", "/server_info", "/v1/models/default", "/elsewhere"):
            client.get(path)
        client.get("/tokenize")
        counts = _metrics(client)
    for code, reason, route in [
        (200, "length", "/v1/chat/completions"), (429, "none", "/v1/chat/completions"),
        (401, "none", "/v1/models/{model:path}"), (200, "none", "/v1/models/{model:path}"),
        (200, "none", "/get_server_info"), (200, "none", "/server_info"), (404, "none", "none"),
        (405, "none", "/tokenize"),
    ]:  # fmt: skip
        assert counts[f'outrider_requests_total{{code="{code}",finish_reason="{reason}",route="{route}"}}'] == 1


def test_gaps_are_those_of_a_choice(metered: RunningGateway) -> None:
    metered.verify[0].reset()
    with httpx.Client(base_url=metered.url) as client:
        before = _metrics(client)
        assert client.post("/v1/completions", json={"prompt": "Hi!", "n": 2}).status_code == 200
        after = _metrics(client)
    counted = {name: after[name] - count for name, count in before.items()}
    assert counted["outrider_time_to_first_token_seconds_count"] == 1
    assert counted["outrider_inter_token_latency_seconds_count"] == 2  # each choice's tokens come in two responses


def test_a_probe_costs_nothing(metered: RunningGateway) -> None:
    metered.verify[0].reset()
    with httpx.Client(base_url=metered.url) as client:
        before, left = _metrics(client), _tokens_left(client)
        assert client.get("/health_generate").status_code == 200
        assert _tokens_left(client) >= left
        after = _metrics(client)
    assert metered.verify[0].requests
    assert all(after[name] == before[name] for name in after if "token" in name or "e2e" in name)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 0, "echo": True}),
        ("/generate", {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 0}}),
    ],
)
def test_tokens_that_nobody_gets_do_not_count(metered: RunningGateway, path: str, body: dict[str, Any]) -> None:
    metered.verify[0].reset()
    with httpx.Client(base_url=metered.url) as client:
        before = _metrics(client)
        assert client.post(path, json=body).status_code == 200
        after = _metrics(client)
    for name, count in [
        ("prompt_tokens_total", 2), ("request_generation_tokens_count", 2), ("request_generation_tokens_sum", 0),
        ("generation_tokens_total", 0), ("time_to_first_token_seconds_count", 0),
    ]:  # fmt: skip
        assert after[f"outrider_{name}"] - before[f"outrider_{name}"] == count


def test_a_page_of_another_origin_empties_no_cache(gateway: RunningGateway) -> None:
    """A browser sends a POST without a body for any page; of ours it is taken."""
    before = gateway.verify[0].flushed
    url = f"{gateway.url}/flush_cache"
    for origin in ("https://elsewhere.test", "null", "", "http://[", f"{gateway.url}0"):
        reply = httpx.post(url, headers={"origin": origin})
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "forbidden")
    assert gateway.verify[0].flushed == before
    assert httpx.post(url, headers={"origin": gateway.url}).status_code == 200


def test_times_begin_with_the_request(metered: RunningGateway) -> None:
    """Times begin with the headers, however long the body takes to come."""
    body = json.dumps({"messages": USER}).encode()
    slow = http.client.HTTPConnection("127.0.0.1", metered.port, timeout=30)
    with httpx.Client(base_url=metered.url) as client, contextlib.closing(slow):
        before = _metrics(client)
        slow.putrequest("POST", "/v1/chat/completions")
        slow.putheader("content-type", "application/json")
        slow.putheader("content-length", str(len(body)))
        slow.endheaders()
        in_flight = "outrider_http_requests_in_flight"
        until(lambda: _metrics(client)[in_flight] >= 2, "only the request that asks is in flight")
        began = time.monotonic()
        for _ in range(20):
            _metrics(client)
        held_s = time.monotonic() - began
        slow.send(body)
        assert slow.getresponse().status == 200
        after = _metrics(client)
        for name in ("time_to_first_token", "e2e_request_latency"):
            assert after[f"outrider_{name}_seconds_sum"] - before[f"outrider_{name}_seconds_sum"] >= held_s


def _metrics(http: httpx.Client) -> dict[str, float]:
    reply = http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line.rsplit(" ", 1) for line in reply.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


UNASKED = ("prompt_tokens_total", "request_prompt_tokens_count", "request_generation_tokens_count",
           "time_to_first_token_seconds_count")  # fmt: skip


@pytest.mark.parametrize(
    "refusal", [ResourceExhausted("full"), Unauthenticated("no"), InvalidArgument("no"), Unavailable("gone")]
)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/chat/completions", {"messages": USER, "stream": True}),
        ("/v1/completions", {"prompt": ["Hello, world!", "Hi!", "x"]}),
        ("/generate", {"text": ["Hello, world!", "Hi!", "x"], "sampling_params": {"stop": "x", "n": 2}}),
    ],
)
def test_what_verify_refuses_costs_nothing(
    metered: RunningGateway, path: str, body: dict[str, Any], refusal: OutriderError
) -> None:
    (verify,) = metered.verify
    with httpx.Client(base_url=metered.url) as client:
        until(lambda: client.get("/health").status_code == 200, "the gateway is not healthy")
        before, left = _metrics(client), _tokens_left(client)
        verify.reset()
        verify.refuse = refusal
        reply = client.post(path, json=body)
        verify.refuse = None
        assert verify.requests
        assert reply.status_code in (400, 401, 429, 503)
        assert int(reply.headers["x-ratelimit-remaining-tokens"]) >= left
        after = _metrics(client)
        assert all(after[f"outrider_{name}"] == before[f"outrider_{name}"] for name in UNASKED)


def test_who_hangs_up_before_the_first_token_pays(metered: RunningGateway) -> None:
    (verify,) = metered.verify
    verify.reset()
    verify.hold_after = 0
    body = json.dumps({"messages": USER}).encode()
    with httpx.Client(base_url=metered.url) as client:
        left = _tokens_left(client)
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", metered.port, timeout=30)) as caller:
            caller.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            metered.wait(verify.holding)
        metered.wait(verify.idle)
        verify.hold_after = None
        assert _tokens_left(client) < left


def _tokens_left(client: httpx.Client) -> int:
    return int(client.get("/v1/models").headers["x-ratelimit-remaining-tokens"])


def test_limits(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-a\nsk-b name=b requests_per_minute=1\nsk-c tokens_per_minute=30\n")
    args = {"api_key_file": str(keys), "requests_per_minute": 5, "max_prompt_tokens": 40, "max_schema_bytes": 50}
    with running(args, lambda: [FakeVerify(folder, vocab_size=410)], tmp_path) as gateway:

        def post(key: str, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return httpx.post(gateway.url + path, json={"messages": USER, **fields}, headers=headers)

        first = post("sk-a")
        assert first.headers["x-ratelimit-limit-requests"] == "5"
        assert first.headers["x-ratelimit-remaining-requests"] == "4"
        assert post("sk-b").status_code == 200
        refused = post("sk-b")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert int(refused.headers["retry-after-ms"]) <= 60_000
        assert [post("sk-c", max_tokens=20).status_code for _ in range(3)][-1] == 429
        assert post("sk-b", "/tokenize", prompt="x", messages=None).status_code == 200
        assert post("sk-d").status_code == 401
        long = post("sk-a", messages=[{"role": "user", "content": "x y" * 40}])
        assert (long.json()["error"]["code"], long.json()["error"]["param"]) == ("context_length_exceeded", "messages")
        schema = {"type": "json_schema", "json_schema": {"schema": {"const": "x" * 50}}}
        assert post("sk-a", response_format=schema).json()["error"]["code"] == "invalid_json_schema"


def test_a_grammar_that_is_too_large_is_told_in_the_words_of_its_kind(folder: Path, tmp_path: Path) -> None:
    with running({"max_schema_bytes": 50}, lambda: [FakeVerify(folder, vocab_size=410)], tmp_path) as gateway:

        def post(**fields: Any) -> httpx.Response:
            return httpx.post(gateway.url + "/v1/chat/completions", json={"messages": USER, **fields})

        for fields, what, size, code in (
            ({"json_schema": '{"const":"' + "x" * 50 + '"}'}, "schema", 62, "invalid_json_schema"),
            ({"regex": "\u00e4" * 30}, "regular expression", 60, "invalid_grammar"),
            ({"ebnf": "x" * 51}, "grammar", 51, "invalid_grammar"),
            ({"structured_outputs": {"grammar": "x" * 51}}, "grammar", 51, "invalid_grammar"),
            ({"structured_outputs": {"choice": ["x" * 42]}}, "grammar of the choices", 51, "invalid_grammar"),
        ):
            told = post(**fields).json()["error"]
            assert told["message"] == f"The {what} has {size} bytes; this server takes 50."
            assert told["code"] == code
            assert told["param"].partition(".")[0] in fields
        assert post(regex="x" * 50).status_code == 200
