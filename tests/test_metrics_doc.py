"""docs/metrics.md names every metric that a process tells, and none besides, with its kind and labels."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from prometheus_client.core import Metric

from draft_service import metrics as draft_metrics
from gateway.metrics import REPLICA_FAMILIES, Metrics
from gateway.replicas import ReplicaSet
from outrider import strangers
from outrider.metrics import Family, new_registry, text
from verify_service import metrics as verify_metrics

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
ROW = re.compile(r"\| `(outrider_\w+)` \| (\w+) \| ([^|]*)\| ([a-z, ]+) \| [^|]+ \|")
ALL = "all"  # tell it


class Row(NamedTuple):
    kind: str
    labels: tuple[str, ...]
    told_by: frozenset[str]


def documented() -> dict[str, Row]:
    rows = ROW.findall(PAGE.read_text())
    assert len({name for name, *_ in rows}) == len(rows)
    return {
        name: Row(kind, tuple(re.findall(r"`(\w+)`", labels)), frozenset(who.split(", ")))
        for name, kind, labels, who in rows
    }


def of_tables(service: str, families: tuple[Family, ...]) -> None:
    told = {name: (row.kind, row.labels) for name, row in documented().items() if service in row.told_by}
    assert told == {family.name: (family.kind, family.labels) for family in families}


def test_verify() -> None:
    of_tables("verify", (*verify_metrics.FAMILIES, *strangers.FAMILIES))


def test_draft() -> None:
    of_tables("draft", (*draft_metrics.FAMILIES, *strangers.FAMILIES))


def test_gateway() -> None:
    metrics = list(Metrics(ReplicaSet([])).registry.collect())
    ours = {scraped_name(metric): metric.type for metric in metrics if metric.name.startswith("outrider_")}
    told = {name: row.kind for name, row in documented().items() if "gateway" in row.told_by}
    assert told == {name: kind for name, kind in ours.items() if name not in everywhere()}
    for family in REPLICA_FAMILIES:
        assert family.labels == ("replica", *documented()[family.name].labels)


def test_every_process() -> None:
    """The metric of every process has the kind that Prometheus reads, which has none for labels alone."""
    lines = [line for line in text(new_registry()).decode().splitlines() if "outrider_" in line]
    (name, row), *more = ((name, row) for name, row in documented().items() if row.told_by == {ALL})
    assert not more
    assert f"# TYPE {name} {row.kind}" in lines
    assert [re.sub('=".*?"', "", line) for line in lines if not line.startswith("#")] == [
        f"{name}{{{','.join(row.labels)}}} 1.0"
    ]


def everywhere() -> set[str]:
    return {name for name, row in documented().items() if row.told_by == {ALL}}


def scraped_name(metric: Metric) -> str:
    return metric.name + {"counter": "_total", "info": "_info"}.get(metric.type, "")


def test_queries_name_metrics_that_there_are() -> None:
    known = documented().keys()
    for name in re.findall(r"(outrider_\w+)", PAGE.read_text()):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        assert name in known or base in known, name
