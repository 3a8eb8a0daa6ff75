"""docker-compose.yml and its relatives, as far as they can be checked without containers (compose.py runs them)."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.args import DraftArgs, GatewayArgs, VerifyArgs
from outrider.flags import Args

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = [name for name, service in SERVICES.items() if "build" in service]
COMMANDS: dict[str, type[Args]] = {"verify": VerifyArgs, "draft": DraftArgs, "gateway": GatewayArgs}


def filled_in(word: str) -> str:
    """A word with the variables' defaults."""
    return re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", word)


@pytest.mark.parametrize("name", [name for name in OURS if not name.startswith("envoy")])
def test_commands_are_taken(name: str) -> None:
    """Every flag is one that the service has, with a value that it takes."""
    command, *words = map(filled_in, SERVICES[name]["command"])
    COMMANDS[command].parse(words)


@pytest.mark.parametrize("name", [name for name in OURS if name.startswith("envoy")])
def test_envoy_takes_its_command(name: str, tmp_path: Path) -> None:
    pytest.importorskip("envoy")
    words = [filled_in(word).replace("/tmp/envoy", str(tmp_path)) for word in SERVICES[name]["command"]]
    script = ROOT / "deploy" / "envoy" / "run.py"
    ended = subprocess.run([sys.executable, script, *words, "--check"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", OURS)
def test_services_can_do_little(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"]
    assert service["user"] == "10001:10001"
    assert service["cap_drop"] == ["ALL"]
    assert {"mem_limit", "pids_limit", "healthcheck", "stop_grace_period"} <= service.keys()
    assert ("ports" in service) == name.startswith("envoy")


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_order_of_start(profile: str) -> None:
    """Everything but verify waits, within its profile, for something to be healthy."""
    names = [name for name in OURS if SERVICES[name]["profiles"] == [profile]]
    assert len(names) == 4
    for name in names:
        needs = SERVICES[name].get("depends_on", {})
        assert set(needs) <= set(names)
        assert bool(needs) != name.startswith("verify")
        assert all(need == {"condition": "service_healthy"} for need in needs.values())


def test_requirements_of_an_image() -> None:
    """What the gateway's image gets has no torch; an extra of extras is resolved."""
    script = ROOT / "deploy" / "docker" / "requirements.py"
    printed = {
        extras: subprocess.run(
            [sys.executable, script, ROOT / "pyproject.toml", extras], capture_output=True, text=True, check=True
        ).stdout.split()
        for extras in ("gateway", "draft", "train")
    }
    assert not any(word.startswith(("torch", "numba")) for word in printed["gateway"])
    assert not any(word.startswith("torch") for word in printed["draft"])
    assert any(word.startswith("torch>") for word in printed["train"])
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert set(core) <= set(printed["gateway"])


def test_a_machine_with_more_gpus() -> None:
    """One verify service for each target GPU, none of them a drafter's."""
    script = ROOT / "deploy" / "gpus.py"
    words = ["--targets", "0", "2", "3", "--drafters", "1", "4"]
    made = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, check=True)
    services = yaml.safe_load(made.stdout)["services"]
    gpus = {name: s["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for name, s in services.items()}
    assert gpus == {"verify-gpu-2": ["2"], "verify-gpu-3": ["3"], "draft-gpu-4": ["4"]}
    assert services["verify-gpu-2"]["command"] == SERVICES["verify-gpu"]["command"]
    twice = subprocess.run([sys.executable, script, *words, "0"], capture_output=True, text=True, check=False)
    assert twice.returncode == 2
