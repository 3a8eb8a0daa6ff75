"""Metrics of one process as scraped, and what happened between two scrapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from outrider.errors import Unavailable
from outrider.no_proxy import FAILURES, open_url

_TIMEOUT_S = 5.0
_MAX_BYTES = 8 * 2**20

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Scrape:
    """All samples of one moment, by name and labels. at_s: of a monotonic clock."""

    at_s: float
    samples: Mapping[tuple[str, Labels], float]

    def total(self, name: str, **labels: str) -> float:
        """Sum over all samples of that name that have these labels."""
        wanted = labels.items()
        return sum(value for (found, own), value in self.samples.items() if found == name and wanted <= own)

    def has(self, name: str) -> bool:
        """Whether there is any sample of that name."""
        return any(found == name for found, _ in self.samples)

    def values(self, label: str, name: str) -> list[str]:
        """The values that a label takes, sorted."""
        return sorted({dict(own).get(label, "") for found, own in self.samples if found == name} - {""})


@dataclass(frozen=True)
class Span:
    """Two scrapes of one process. Rates are of the time between; of a counter that began anew, nothing is said."""

    before: Scrape
    now: Scrape

    def change(self, name: str, **labels: str) -> float:
        """The growth of a counter."""
        return max(0.0, self.now.total(name, **labels) - self.before.total(name, **labels))

    def rate(self, name: str, **labels: str) -> float:
        """The growth of a counter in a second."""
        return self.change(name, **labels) / max(1e-9, self.now.at_s - self.before.at_s)

    def mean_ms(self, histogram: str, **labels: str) -> float | None:
        """Mean of what a histogram of seconds saw, or None where it saw nothing."""
        return self.share(f"{histogram}_sum", f"{histogram}_count", 1000.0, **labels)

    def share(self, part: str, whole: str, times: float = 1.0, **labels: str) -> float | None:
        """The growth of one counter for each of another; None where that one stood still."""
        grown = self.change(whole, **labels)
        return times * self.change(part, **labels) / grown if grown else None


def parse(text: str, at_s: float) -> Scrape:
    """A scrape from Prometheus' text format. ValueError for anything else."""
    samples: dict[tuple[str, Labels], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name, frozenset(sample.labels.items())] = float(sample.value)
    return Scrape(at_s, samples)


def fetch(url: str, at_s: float) -> Scrape:
    """What a process tells at `url`. Unavailable when it cannot be had."""
    try:
        with open_url(url, _TIMEOUT_S) as answer:  # an operator's own URL
            return parse(answer.read(_MAX_BYTES).decode(), at_s)
    except FAILURES as error:
        raise Unavailable(f"{url}: {error}") from error
