"""Work that grows with requests and answers is done beside the event loop, with the same outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from gateway import chat, completions, native, offload
from tests.gateway.fakes import RunningGateway

USER: Any = [{"role": "user", "content": "Hi!"}]
TOOL: Any = {"type": "function", "function": {"name": "now", "parameters": {"properties": {"a": {"type": "integer"}}}}}
SCHEMA: Any = {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"type": "integer"}}}}}

Noted = Callable[[Any, str], set[bool]]


@pytest.fixture
def noted(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> Noted:
    """Notes whether a function of a module runs on the event loop."""

    async def here() -> threading.Thread:
        return threading.current_thread()

    loop = gateway.loop.run(here())

    def note(module: Any, name: str) -> set[bool]:
        seen, work = set[bool](), getattr(module, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            seen.add(threading.current_thread() is loop)
            return work(*args, **kwargs)

        monkeypatch.setattr(module, name, noting)
        return seen

    return note


@pytest.mark.parametrize("fields", [{"tools": [TOOL], "tool_choice": "required"}, {"response_format": SCHEMA}])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_schemas(
    gateway: RunningGateway, noted: Noted, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    if path == "/v1/responses":
        flat = {"tools": [{"type": "function", **TOOL["function"]}], "tool_choice": fields.get("tool_choice", "auto")}
        form = {"type": "json_schema", "name": "n", **SCHEMA["json_schema"]}
        fields = {"input": "Hi!", **(flat if "tools" in fields else {"text": {"format": form}})}
    else:
        fields = {"messages": USER, **fields}
    seen = noted(chat, "chat_rules")
    assert httpx.post(gateway.url + path, json=fields).status_code == 200
    assert seen == {True}
    seen.clear()
    held = gateway.verify[0].requests[-1].sampling.grammar
    monkeypatch.setattr(offload, "INLINE_BYTES", 16)
    assert httpx.post(gateway.url + path, json=fields).status_code == 200
    assert seen == {False}
    assert gateway.verify[0].requests[-1].sampling.grammar == held


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL]}])
def test_conversations_without_schemas_that_are_put_in_other_words(
    gateway: RunningGateway, noted: Noted, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    seen = noted(chat, "chat_rules")
    monkeypatch.setattr(offload, "INLINE_BYTES", 16)
    body = {"messages": USER, **fields}
    assert httpx.post(gateway.url + "/v1/chat/completions", json=body).status_code == 200
    assert seen == {True}


@pytest.mark.parametrize(
    ("module", "path", "body"),
    [
        (chat, "/v1/chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 2}),
        (completions, "/v1/completions", {"prompt": "Say: ", "logprobs": 2}),
        (completions, "/v1/completions", {"prompt": ["Say: ", "a"], "logprobs": 0, "echo": True, "max_tokens": 0}),
        (native, "/generate", {"text": "Say: ", "return_logprob": True, "top_logprobs_num": 2}),
        (native, "/generate", {"text": ["a", "b"], "return_logprob": [False, True], "logprob_start_len": 0}),
    ],
)
def test_log_probabilities(
    gateway: RunningGateway, noted: Noted, monkeypatch: pytest.MonkeyPatch, module: Any, path: str, body: dict[str, Any]
) -> None:
    def ask(**fields: Any) -> Any:
        reply = httpx.post(gateway.url + path, json={**body, **fields})
        assert reply.status_code == 200
        return without_times(reply.json())

    seen = noted(module, "json_response")
    inline = ask(n=2) if path != "/generate" else ask()
    assert seen == {True}
    seen.clear()
    monkeypatch.setattr(offload, "INLINE_BYTES", offload.LOGPROB_COST)
    assert (ask(n=2) if path != "/generate" else ask()) == inline
    assert seen == {False}
    seen.clear()
    ask(**{name: None for name in ("logprobs", "top_logprobs", "top_logprobs_num", "return_logprob") if name in body})
    assert seen == {True}


def without_times(answer: Any) -> Any:
    """An answer without what is another each time."""
    if isinstance(answer, list):
        return [without_times(item) for item in answer]
    if not isinstance(answer, dict):
        return answer
    return {name: without_times(item) for name, item in answer.items() if name not in ("id", "created", "e2e_latency")}
