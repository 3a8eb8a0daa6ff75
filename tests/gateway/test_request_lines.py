"""Lines of the log that are about a request name it, and no others do; a stream that ends in an error is counted so."""

from __future__ import annotations

from pathlib import Path

import httpx
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs
from tokenizers import Tokenizer

from outrider.errors import Internal
from tests.gateway.fakes import FAST_RETRY, running
from tests.gateway.test_http_faults import CHAT, USER, plain_fake
from tests.polling import until


def ask(client: httpx.Client, name: str, **fields: object) -> httpx.Response:
    """One request of that id."""
    return client.post(CHAT, json={"messages": USER, **fields}, headers={"x-request-id": name})


COUNTED = 'outrider_requests_total{code="200",finish_reason="error",route="/v1/chat/completions"} 1.0'


def test_lines_about_a_request_name_it(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with (
        running({}, lambda: [plain_fake(folder, tokenizer)], tmp_path) as gateway,
        capture_logs(processors=[merge_contextvars]) as logs,
        httpx.Client(base_url=gateway.url) as client,  # one connection for all
    ):
        (verify,) = gateway.verify
        assert ask(client, "odd", strange=1).status_code == 200
        verify.refuse = Internal("nothing to tell a client")
        assert ask(client, "failing").status_code == 500
        verify.refuse = None
        verify.break_after = [2, *[0] * FAST_RETRY.max_failures]
        assert ask(client, "broken", stream=True).status_code == 200
        until(lambda: COUNTED in client.get("/metrics").text, "it was not counted")  # a moment after its last byte
    ids = {(log["event"], log.get("request_id")) for log in logs}
    assert {
        ("ignored an unknown field", "odd"), ("a generate call broke", "broken"),
        ("a stream ended in an error", "broken"), ("http", "odd"), ("http", "failing"), ("http", "broken"),
    } <= ids  # fmt: skip
    assert {name for event, name in ids if event.startswith("verify service")} <= {None}
