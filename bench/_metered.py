"""Outrider served for a benchmark, with the brake off and the metrics of its two services at hand."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from bench._load import failures_told
from bench._serve_flags import check_serve_flags
from bench._server import free_port, ours_serving
from outrider.scrape import Scrape, fetch


@dataclass(frozen=True)
class Metered:
    """A client of the server, and the port of verify's metrics; the drafter's are at the next one."""

    client: httpx.Client
    port: int

    def verify(self) -> Scrape:
        """Verify's metrics now."""
        return fetch(f"http://127.0.0.1:{self.port}/metrics", time.monotonic())

    def draft(self) -> Scrape:
        """The drafter's metrics now."""
        return fetch(f"http://127.0.0.1:{self.port + 1}/metrics", time.monotonic())


@contextmanager
def metered(serve_flags: Sequence[str], *, overlap: bool) -> Iterator[Metered]:
    """Runs `outrider serve` with these flags for the time of the block; overlap: always drafting early, or never.

    StartupError for flags that are not for a benchmark, and for a server that refuses or dies.
    """
    check_serve_flags(serve_flags, "metrics_port")
    port = free_port(3)  # the gateway's, and the metrics' of verify and drafter
    metrics = port + 1
    flags = ["--disable-speculation-brake", f"--metrics-port={metrics}", *serve_flags]
    with (
        ours_serving(flags, port, {"OUTRIDER_ENABLE_SPEC_V2": "1" if overlap else "0"}) as served,
        failures_told(served.url),
        httpx.Client(base_url=served.url, timeout=600, trust_env=False) as client,
    ):
        yield Metered(client, metrics)
