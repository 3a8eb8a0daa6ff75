"""Flags of metrics, which every service takes."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import StartupError
from outrider.flags import Args, arg


@dataclass(frozen=True, kw_only=True)
class ObservingArgs(Args):
    """Where to look at a service from."""

    metrics_host: str = arg("127.0.0.1", "observing", "Address to serve Prometheus metrics on.")
    metrics_port: int | None = arg(
        None, "observing",
        "Port to serve Prometheus metrics on, without key or TLS; 0 takes a free one. Default: none.",
    )  # fmt: skip

    def check(self) -> None:
        """Bounds."""
        if self.metrics_port is not None and not 0 <= self.metrics_port < 2**16:
            raise StartupError(f"--metrics-port is {self.metrics_port}; it must be from 0 to 65535")
