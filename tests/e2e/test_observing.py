"""One request through real processes: its trace, its log lines, the metrics of every part, keys and tokens between."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.drafters import main as drafters
from tests.certificates import Authority
from tests.e2e.small_model import write_small_model
from tests.e2e.stack import Process
from tests.otlp import Collector, collecting
from tests.polling import until

FLAGS = (
    "--dtype=float32", "--device=cpu", "--threads=1", "--max-total-tokens=4096", "--context-length=512",
    "--disable-speculation-brake", "--port=0", "--speculative-ngram-capacity=50000", "--decode-log-interval=5",
)  # fmt: skip


def samples(url: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(url).text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


@pytest.mark.timeout(600)
def test_one_request_is_seen_in_all_parts(tmp_path: Path) -> None:
    model = write_small_model(tmp_path / "model")
    authority = Authority(tmp_path)
    certfile, keyfile = authority.issue("localhost")
    (tmp_path / "tokens").write_text("a-token-between-services")
    with collecting() as collector:
        process = Process(
            "serve", f"--model-path={model}", *FLAGS, f"--otlp-traces-endpoint={collector.endpoint}",
            "--otlp-traces-sample-ratio=1", f"--token-file={tmp_path}/tokens", f"--ssl-certfile={certfile}",
            f"--ssl-keyfile={keyfile}", env={"OTEL_BSP_SCHEDULE_DELAY": "200"},
        )  # fmt: skip
        try:
            url = process.wait_for(r"Outrider serves .* at https://127.0.0.1:(\d+)").group(1)
            verify_url, draft_url, _ = process.wait_for(r"Metrics at (\S+) (\S+) (\S+)").groups()
            address = process.wait_for(r"--verify-address=(\S+)").group(1)
            answer = httpx.post(
                f"https://localhost:{url}/v1/chat/completions", verify=_trust(authority), timeout=120,
                headers={"x-request-id": "the-one"},
                json={"messages": [{"role": "user", "content": "Hi!"}], "max_tokens": 40, "temperature": 0},
            ).json()  # fmt: skip
            usage = answer["usage"]
            num_tokens = usage["completion_tokens"]
            until(lambda: samples(verify_url)["outrider_generation_tokens_total"] >= num_tokens, "tokens are missing")
            until(
                lambda: samples(draft_url)["outrider_draft_verdict_tokens_total"] >= num_tokens, "verdicts are missing"
            )
            verify, draft = samples(verify_url), samples(draft_url)
            until(
                lambda: has_all(collector, usage), "spans are missing"
            )  # at its end a service gives its spans a second alone
            said: list[str] = []
            assert drafters(["list", f"--verify-address={address}"], said.append) == 0
            assert "NGRAM" in said[-1]
        finally:
            assert process.stop() == 0
    check_metrics(usage, verify, draft)
    check_trace(collector, usage)
    lines = [json.loads(line) for line in process.lines if line.startswith("{")]
    (call,) = [line for line in lines if line["event"] == "generate"]
    assert "the-one" in call["request_id"]
    assert (call["service"], call["end"], call["tokens"]) == ("verify", "finished", usage["completion_tokens"])
    (http,) = [line for line in lines if line["event"] == "http" and line["path"].startswith("/v1/chat")]
    assert (http["service"], http["request_id"]) == ("gateway", "the-one")
    assert {"running_req", "token_usage", "accept_len", "accept_rate", "queue_req"} <= {
        key for line in lines if line["event"] == "decode batch" for key in line
    }


def check_metrics(usage: dict[str, Any], verify: dict[str, float], draft: dict[str, float]) -> None:
    """Checks that the parts' numbers agree with the answer's and with one another."""
    assert verify["outrider_generation_tokens_total"] == usage["completion_tokens"]
    assert verify["outrider_prompt_tokens_total"] == usage["prompt_tokens"]
    speculation = usage["speculation"]
    assert verify["outrider_spec_verify_calls_total"] == speculation["verify_steps"]
    assert verify["outrider_spec_accepted_tokens_total"] == speculation["accepted_tokens"]
    assert verify["outrider_drafter_up"] == 1
    assert draft["outrider_draft_verdict_tokens_total"] >= usage["completion_tokens"]
    assert draft["outrider_draft_proposals_total"] >= verify["outrider_proposals_total"] > 0
    assert verify["process_resident_memory_bytes"] > 0
    assert draft["process_resident_memory_bytes"] > 0


def has_all(collector: Collector, usage: dict[str, Any]) -> bool:
    """Whether the spans of all parts have come."""
    names = Counter(span.name for span in collector.spans)
    once = all(map(names.__getitem__, ("POST /v1/chat/completions", "Generate", "prefill", "draft")))
    return once and names["round"] >= usage["speculation"]["verify_steps"]


def check_trace(collector: Collector, usage: dict[str, Any]) -> None:
    """Checks the one trace: the gateway's request, below it verify's call, below that its rounds and drafts."""
    (request,) = collector.named("POST /v1/chat/completions")
    (call,) = collector.named("Generate")
    assert (request.service, call.service) == ("outrider-gateway", "outrider-verify")
    assert (request.parent_id, call.parent_id) == ("", request.span_id)
    (prefill,), rounds, drafts = collector.named("prefill"), collector.named("round"), collector.named("draft")
    assert {span.trace_id for span in collector.spans} == {request.trace_id}
    assert {span.parent_id for span in (prefill, *rounds, *drafts)} == {call.span_id}
    assert {span.service for span in drafts} == {"outrider-draft"}
    assert len(drafts) > 0
    assert len(rounds) == usage["speculation"]["verify_steps"]
    tokens = sum(span.attributes["outrider.tokens"] for span in (prefill, *rounds))
    assert tokens == usage["completion_tokens"]
    assert sum(span.attributes["outrider.accepted"] for span in rounds) == usage["speculation"]["accepted_tokens"]
    for span in (prefill, *rounds):
        assert request.start_ns <= span.start_ns <= span.end_ns <= request.end_ns
    # Verify ends the call when its last message is on its way, which the gateway may have passed on by then.
    assert request.start_ns <= call.start_ns <= min(span.start_ns for span in rounds)
    assert call.end_ns >= max(span.end_ns for span in rounds)


def _trust(authority: Authority) -> Any:
    import ssl

    return ssl.create_default_context(cafile=authority.path)


def test_without_opentelemetry_the_flag_is_refused_and_nothing_else_needs_it() -> None:
    code = (
        "import sys\n"
        "for name in ('opentelemetry', 'trustme', 'cryptography'): sys.modules[name] = None\n"
        "from outrider.args import VerifyArgs\n"
        "from outrider.tracing import tracing_of\n"
        "assert tracing_of(VerifyArgs(), 'verify') is None\n"
        "tracing_of(VerifyArgs(otlp_traces_endpoint='http://x'), 'verify')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert re.search(r"StartupError: --otlp-traces-endpoint needs .*pip install \'\.\[tracing\]\'", done.stderr)
