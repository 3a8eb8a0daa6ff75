"""What /metrics shows: the gateway's own counts, and the verify services' as they were last asked for them.

What is counted once a token is a plain number until somebody looks. Means are left to whoever reads the counters. No
label holds a request, a session or a user.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence
from functools import partial

from prometheus_client import Counter, Gauge, Histogram

from gateway.replicas import ReplicaSet
from outrider.algorithms import algorithm_name
from outrider.metrics import SECONDS, Buckets, Families, Family, Reading, new_registry, reached, text
from outrider.speculation_count import SpeculationCount

REPLICA_FAMILIES = (
    Family("outrider_verify_up", "gauge", "Whether a verify service takes sessions.", ("replica",)),
    Family("outrider_requests_running", "gauge", "Sessions in the batch.", ("replica",)),
    Family("outrider_requests_waiting", "gauge", "Sessions waiting.", ("replica",)),
    Family("outrider_kv_pages", "gauge", "Pages of the KV pool.", ("replica", "state")),
    Family("outrider_kv_usage_ratio", "gauge", "Pages in use, of all.", ("replica",)),
    Family("outrider_preemptions_total", "counter", "Sessions sent back to the queue.", ("replica",)),
    Family("outrider_drafter_up", "gauge", "Drafters that are enlisted.", ("replica", "algorithm")),
)
_EACH_TOKEN = (
    Family("outrider_generation_tokens_total", "counter", "Tokens given to clients."),
    Family("outrider_inter_token_latency_seconds", "histogram", "Between a choice's responses with tokens."),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Metrics:
    """One gateway's registry."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self.registry = registry = new_registry()
        registry.register(Families(REPLICA_FAMILIES, partial(_read_replicas, replicas)))

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"outrider_{name}", help, labels, registry=registry)

        def histogram(name: str, help: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"outrider_{name}", help, registry=registry, buckets=buckets)

        self.requests = counter("requests_total", "Requests answered.", "route", "code", "finish_reason")
        self.in_flight = Gauge("outrider_http_requests_in_flight", "Requests being answered.", registry=registry)
        self.unknown_fields = counter(
            "unknown_fields_total", "Body fields that are not known, and parts that are left out."
        )
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of answers that began.")
        self.num_tokens = 0  # given to clients
        self.gaps = Buckets(SECONDS)  # between a choice's responses with tokens
        registry.register(Families(_EACH_TOKEN, self._read))
        self.cache_hits = counter("prefix_cache_hit_tokens_total", "Prompt tokens found in the prefix cache.")
        self.first_token = histogram("time_to_first_token_seconds", "From a request to its first token.", SECONDS)
        self.whole = histogram("e2e_request_latency_seconds", "From a request to its last token.", SECONDS)
        self.prompt_size = histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.answer_size = histogram("request_generation_tokens", "Tokens of an answer, all choices.", _TOKENS)
        self._steps = counter("spec_verify_calls_total", "Verify steps, plain ones included.")
        self._drafted = counter("spec_draft_tokens_total", "Draft tokens verified.")
        self._accepted = counter("spec_accepted_tokens_total", "Draft tokens accepted.")
        self._by_position = counter(
            "spec_accepted_tokens_per_position_total", "Draft tokens accepted at a depth of the tree.", "position"
        )

    def _read(self, reading: Reading) -> None:
        reading.add("outrider_generation_tokens_total", self.num_tokens)
        reading.add_buckets("outrider_inter_token_latency_seconds", self.gaps)

    def count_speculation(self, count: SpeculationCount) -> None:
        """Adds what speculation did for one answer."""
        self._steps.inc(count.verify_steps)
        self._drafted.inc(count.draft_tokens)
        self._accepted.inc(count.accepted_tokens)
        for position, steps in reached(count.accepted_histogram):
            if steps:
                self._by_position.labels(position).inc(steps)

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return text(self.registry)


class Stopwatch:
    """The times of one answer, which may have several choices. `began` is when its request came, in monotonic time."""

    def __init__(self, metrics: Metrics, began: float) -> None:
        self._metrics = metrics
        self._began = began
        self._last: dict[int, float] = {}  # when each choice last got tokens

    def tokens(self, choice: int) -> None:
        """Notes that tokens of a choice came."""
        now = time.monotonic()
        if choice in self._last:
            self._metrics.gaps.observe(now - self._last[choice])
        elif not self._last:
            self._metrics.first_token.observe(now - self._began)
        self._last[choice] = now

    def done(self) -> None:
        """Notes that the last token has come."""
        self._metrics.whole.observe(time.monotonic() - self._began)


def _read_replicas(replicas: ReplicaSet, reading: Reading) -> None:
    """The state of each verify service, by its address."""
    for address, serving in replicas.states:
        reading.add("outrider_verify_up", float(serving), address)
    for address, info in replicas.infos:
        state = info.state
        used = state.total_pages - state.free_pages
        reading.add("outrider_requests_running", state.running_requests, address)
        reading.add("outrider_requests_waiting", state.queued_requests, address)
        reading.add("outrider_kv_pages", used, address, "used")
        reading.add("outrider_kv_pages", state.free_pages, address, "free")
        reading.add("outrider_kv_usage_ratio", used / max(state.total_pages, 1), address)
        reading.add("outrider_preemptions_total", state.preemptions, address)
        names = [algorithm_name(drafter.algorithm) for drafter in info.drafters]
        for algorithm, number in collections.Counter(names).items():
            reading.add("outrider_drafter_up", number, address, algorithm)
