"""Prometheus metrics that cost nothing while nobody looks: the work keeps plain numbers, a scrape reads them.

A process declares its families in a table; `Families` turns that table and a function that reads the numbers into a
collector. Nothing here waits for a device, takes a lock that the work takes, or runs once a token.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Info, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

import outrider

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
SHORT_SECONDS = (0.0001, 0.00025, 0.0005, *SECONDS[:12])  # of steps, drafts, replies

disable_created_metrics()  # a time beside every counter, which nobody reads


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: its name as scraped (counters end in _total), what it says, and the labels that tell values apart."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


class Buckets:
    """A histogram of plain numbers. One thread observes; others may read, and may see the newest value half counted."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SHORT_SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Counts one value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value


class Reading:
    """The values of one scrape. Label values are given in the order of the family's labels."""

    def __init__(self, families: Sequence[Family], constant: Sequence[tuple[str, str]]) -> None:
        names = [name for name, _ in constant]
        self._constant = [value for _, value in constant]
        self._metrics = {family.name: _metric(family, names) for family in families}

    def add(self, name: str, value: float, *labels: str) -> None:
        """The value of a counter or gauge. KeyError for a name that is not declared."""
        metric = self._metrics[name]
        assert isinstance(metric, CounterMetricFamily | GaugeMetricFamily)
        metric.add_metric([*self._constant, *labels], value)

    def add_buckets(self, name: str, buckets: Buckets, *labels: str) -> None:
        """The value of a histogram."""
        metric = self._metrics[name]
        assert isinstance(metric, HistogramMetricFamily)
        below, pairs = 0, []
        for bound, count in zip((*map(str, map(float, buckets.bounds)), "+Inf"), list(buckets.counts), strict=True):
            below += count
            pairs.append((bound, below))
        metric.add_metric([*self._constant, *labels], pairs, buckets.total)

    def metrics(self) -> Iterable[Metric]:
        """What was added; a family without values has its name and help."""
        return self._metrics.values()


class Families(Collector):
    """Collects declared families: `read` fills in a Reading, on the thread that scrapes.

    constant: labels that all of them have, and their values.
    """

    def __init__(
        self, families: Sequence[Family], read: Callable[[Reading], None], constant: Sequence[tuple[str, str]] = ()
    ) -> None:
        self._families, self._read, self._constant = families, read, constant

    def describe(self) -> Iterable[Metric]:
        """Names without values."""
        return Reading(self._families, self._constant).metrics()

    def collect(self) -> Iterable[Metric]:
        """Names with the values of now."""
        reading = Reading(self._families, self._constant)
        self._read(reading)
        return reading.metrics()


def reached(histogram: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Positions of a draft, last first, and the steps that accepted so many drafts or more.

    histogram: steps by the drafts that they accepted.
    """
    steps = 0
    for position in range(len(histogram) - 1, 0, -1):
        steps += histogram[position]
        yield position, steps


def new_registry() -> CollectorRegistry:
    """A registry that tells the release, and the process's memory, CPU time and open files."""
    registry = CollectorRegistry()
    Info("outrider_build", "This release.", registry=registry).info({"version": outrider.__version__})
    ProcessCollector(registry=registry)
    return registry


def text(registry: CollectorRegistry) -> bytes:
    """Everything, in Prometheus' text format."""
    return generate_latest(registry)


def _metric(family: Family, constant: Sequence[str]) -> Metric:
    labels = [*constant, *family.labels]
    match family.kind:
        case "counter":
            return CounterMetricFamily(family.name.removesuffix("_total"), family.help, labels=labels)
        case "gauge":
            return GaugeMetricFamily(family.name, family.help, labels=labels)
        case "histogram":
            return HistogramMetricFamily(family.name, family.help, labels=labels)
