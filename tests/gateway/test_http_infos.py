"""What is told beside answers: ids of text, metrics, limits in headers, caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from tests.gateway.fakes import FakeVerify, RunningGateway, running

USER: Any = [{"role": "user", "content": "Hi!"}]


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
        chat = http.post("/tokenize", json={"messages": USER}).json()["tokens"]
        text = http.post("/detokenize", json={"tokens": chat}).json()
        assert text["prompt"] == text["text"] == "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
        back = http.post("/detokenize", json={"tokens": [made["tokens"], []], "skip_special_tokens": True}).json()
        assert back["text"] == ["Hi, 東", ""]
        for path, body, param in [
            ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
            ("/tokenize", {"messages": USER, "add_generation_prompt": False}, "add_generation_prompt"),
            ("/detokenize", {"tokens": [1, [2]]}, "tokens"), ("/detokenize", {"tokens": [10**6]}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ]:  # fmt: skip
            reply = http.post(path, json=body)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


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


def _metrics(http: httpx.Client) -> dict[str, float]:
    reply = http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line.rsplit(" ", 1) for line in reply.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


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
