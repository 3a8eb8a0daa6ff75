"""Flags of metrics and traces, which every service takes."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.args.links import host_port
from outrider.errors import StartupError
from outrider.flags import Args, arg, bound_host, is_url


@dataclass(frozen=True, kw_only=True)
class ObservingArgs(Args):
    """Where to look at a service from."""

    metrics_host: str = arg("127.0.0.1", "observing", "Address to serve Prometheus metrics on.", read=bound_host)
    metrics_port: int | None = arg(
        None, "observing",
        "Port to serve Prometheus metrics on, without key or TLS; 0 takes a free one. Default: none.",
    )  # fmt: skip

    otlp_traces_endpoint: str | None = arg(
        None, "observing",
        "OpenTelemetry collector to send traces to, by OTLP over HTTP: http://HOST:4318/v1/traces. Default: none.",
    )  # fmt: skip
    otlp_traces_sample_ratio: float = arg(
        0.01, "observing", "Share of the requests that are traced, of those whose caller does not say."
    )

    @property
    def metrics_addresses(self) -> tuple[str, ...]:
        """Where metrics are served, for whoever looks whether it is free."""
        if not self.metrics_port:
            return ()
        return (host_port(self.metrics_host, self.metrics_port),)

    def check(self) -> None:
        """StartupError for values out of bounds."""
        super().check()
        endpoint, ratio = self.otlp_traces_endpoint, self.otlp_traces_sample_ratio
        if endpoint is not None and not is_url(endpoint):
            raise StartupError(f"--otlp-traces-endpoint is {endpoint!r}; it must be an http or https URL")
        if not 0 <= ratio <= 1:
            raise StartupError(f"--otlp-traces-sample-ratio is {ratio}; it must be from 0 to 1")
        if endpoint is None and ratio != ObservingArgs.otlp_traces_sample_ratio:
            raise StartupError("--otlp-traces-sample-ratio needs --otlp-traces-endpoint")
        if self.metrics_port is not None and not 0 <= self.metrics_port < 2**16:
            raise StartupError(f"--metrics-port is {self.metrics_port}; it must be from 0 to 65535")
