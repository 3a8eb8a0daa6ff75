"""The dashboard, the alerts and the scrape configuration name what there is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from draft_service.metrics import FAMILIES as DRAFT
from gateway.metrics import Metrics
from gateway.replicas import ReplicaSet
from outrider.metrics import new_registry
from outrider.strangers import FAMILIES as STRANGERS
from verify_service.metrics import FAMILIES as VERIFY

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/dashboards/outrider.json").read_text())
RULES: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())
SCRAPED: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
NAME = re.compile(r"\b((?:outrider|process)_\w+)(\{[^}]*\})?")
MATCHER = re.compile(r'(\w+)(=~|=|!=|!~)"([^"]*)"')
CONSTANT = {"verify": {"model"}, "draft": {"algorithm"}, "gateway": {"replica"}}
TARGET = {"job", "instance"}


def dashboard_queries() -> Iterator[str]:
    """Every expression of the dashboard."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        yield variable["query"]["query"]


def rule_queries() -> Iterator[str]:
    """Every expression of the rules."""
    for group in RULES["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]


def told() -> dict[str, dict[str, set[str] | None]]:
    """For each job, names as scraped, with their labels where these are declared."""
    process = {name: None for metric in new_registry().collect() for name in scraped_names(metric)}
    verify: dict[str, set[str] | None] = {family.name: {*family.labels} for family in (*VERIFY, *STRANGERS)}
    draft: dict[str, set[str] | None] = {family.name: {*family.labels} for family in (*DRAFT, *STRANGERS)}
    registry = Metrics(ReplicaSet(("127.0.0.1:1",))).registry
    gateway = {name: None for metric in registry.collect() for name in scraped_names(metric)}
    return {"verify": {**process, **verify}, "draft": {**process, **draft}, "gateway": {**process, **gateway}}


def scraped_names(metric: Any) -> Iterator[str]:
    """The names under which a metric is scraped: a counter's ends in _total."""
    yield f"{metric.name}_total" if metric.type == "counter" else metric.name


def jobs_of(matchers: str) -> list[str]:
    """The jobs that a selector names."""
    for label, _, value in MATCHER.findall(matchers):
        if label == "job":
            return value.split("|")
    raise AssertionError(f"{matchers} names no job: verify and gateway tell metrics of one name")


@pytest.mark.parametrize("query", [*dashboard_queries(), *rule_queries()])
def test_every_metric_exists_where_it_is_looked_for(query: str) -> None:
    names = told()
    found = NAME.findall(query)
    assert found
    for name, matchers in found:
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        for job in jobs_of(matchers):
            assert family in names[job], f"{job} has no {family}"
            labels = names[job][family]
            if labels is not None:
                asked = {label for label, _, _ in MATCHER.findall(matchers)} - TARGET
                assert asked <= labels | CONSTANT[job], f"{family} has no such label: {asked}"


@pytest.mark.parametrize("query", [*dashboard_queries(), *rule_queries()])
def test_sums_keep_labels_that_exist(query: str) -> None:
    """`by` and `on` name labels that one of the expression's metrics has."""
    names = told()
    there = {"le", *TARGET}
    for name, matchers in NAME.findall(query):
        for job in jobs_of(matchers):
            labels = names[job][re.sub(r"_(bucket|sum|count)$", "", name)]
            there |= CONSTANT[job] | (GATEWAY_LABELS if labels is None else labels)
    for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", query):
        assert {label.strip() for label in group.split(",")} <= there


GATEWAY_LABELS = {"code", "replica"}


def test_every_job_that_is_asked_is_scraped() -> None:
    scraped = {config["job_name"] for config in SCRAPED["scrape_configs"]}
    asked = {
        job for query in (*dashboard_queries(), *rule_queries()) for _, m in NAME.findall(query) for job in jobs_of(m)
    }
    assert asked <= scraped


def test_what_is_scraped_is_what_compose_serves() -> None:
    """The names are aliases in docker-compose.yml, and the ports those that the commands there open."""
    compose = yaml.safe_load((DEPLOY.parent / "docker-compose.yml").read_text())
    services = [service for service in compose["services"].values() if "command" in service]
    for config in SCRAPED["scrape_configs"]:
        (found,) = config["dns_sd_configs"]
        ours = [s for s in services if found["names"][0] in aliases(s)]
        assert ours, found
        for service in ours:
            assert found["port"] == 9901 or f"--metrics-port={found['port']}" in service["command"]


def aliases(service: dict[str, Any]) -> list[str]:
    """Names by which a service is found."""
    networks = service.get("networks", {})
    return networks.get("inner", {}).get("aliases", []) if isinstance(networks, dict) else []


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Prometheus' promtool")
def test_prometheus_takes_it(tmp_path: Path) -> None:
    """Its own tool checks the configuration, the rules, and the dashboard's expressions as if they were rules."""
    rules = [
        {"record": f"panel:{index}", "expr": query.replace("$__rate_interval", "1m")}
        for index, query in enumerate(dashboard_queries())
        if not query.startswith("label_values")
    ]
    panels = tmp_path / "panels.yml"
    panels.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    folder = DEPLOY / "prometheus"
    for words in (["config", folder / "prometheus.yml"], ["rules", folder / "rules.yml"], ["rules", panels]):
        ended = subprocess.run(["promtool", "check", *words], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_probes_do_not_hide_errors_and_streams_that_break_off_are_counted() -> None:
    """Each failure counts among few requests and many probes; a stream that fails has sent 200 before."""
    (rule,) = (rule for group in RULES["groups"] for rule in group["rules"] if rule.get("alert") == "ServerErrors")
    failed, asked = rule["expr"].split(" / ")
    for _, matchers in NAME.findall(rule["expr"]):
        (pattern,) = (value for label, sign, value in MATCHER.findall(matchers) if (label, sign) == ("route", "!~"))
        assert all(re.fullmatch(pattern, path) for path in ("/health", "/metrics"))
        assert not re.fullmatch(pattern, "/v1/chat/completions")
    assert 'code=~"5.."' in failed
    assert 'finish_reason="error"' in failed
    assert "finish_reason" not in asked
