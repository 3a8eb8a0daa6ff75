"""Flags of `outrider top`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outrider.errors import StartupError
from outrider.flags import Args, arg, check_url


@dataclass(frozen=True, kw_only=True)
class TopArgs(Args):
    """Settings of `outrider top`."""

    command: ClassVar[str] = "top"
    summary: ClassVar[str] = "Show what verify and draft services are doing at the moment, from their metrics."

    metrics: tuple[str, ...] = arg(
        ("http://127.0.0.1:9400/metrics", "http://127.0.0.1:9401/metrics"), "services",
        "Where a process tells its metrics; `outrider serve` prints it. Repeatable.",
    )  # fmt: skip
    interval_s: float = arg(2.0, "view", "Seconds between looks; rates are of this time.")
    once: bool = arg(
        False,
        "view",
        "Print one frame and end, with 1 where a process did not answer, else 2 where one is neither service.",
    )

    def check(self) -> None:
        """StartupError for values out of bounds."""
        if not 0 < self.interval_s <= 3600:
            raise StartupError(f"--interval-s is {self.interval_s:g}; it must be above 0 and at most 3600")
        for url in self.metrics:
            check_url("--metrics", url, "http://127.0.0.1:9400/metrics")
