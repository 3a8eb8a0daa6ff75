"""docker-compose.yml and its relatives, as far as they can be checked without containers (compose.py runs them)."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import ssl
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from draft_service.drafters.factory import describe_drafter
from outrider.args import DraftArgs, GatewayArgs, VerifyArgs
from outrider.args.tools import HealthArgs
from outrider.health import client_context
from outrider.tls import http_context, server_files

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "docker-compose.yml", ROOT / "docker-compose.tls.yml"]
COMPOSE, TLS = (yaml.safe_load(path.read_text()) for path in FILES)
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = [name for name, service in SERVICES.items() if "build" in service]
COMMANDS: dict[str, type[VerifyArgs | DraftArgs | GatewayArgs]] = {
    "verify": VerifyArgs, "draft": DraftArgs, "gateway": GatewayArgs
}  # fmt: skip


def filled_in(word: str) -> str:
    """A word with the variables' defaults."""
    return re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", word)


def test_images_are_built_on_the_base_image_alone() -> None:
    """The build image follows OUTRIDER_BASE_IMAGE: what one image installs does not run in another."""
    for name in OURS:
        build = SERVICES[name]["build"]
        assert filled_in(build["args"]["BUILD_IMAGE"]) == ""
        text = (ROOT / build["dockerfile"]).read_text()
        assert 'ARG BUILD_IMAGE=""' in text
        assert re.findall("^FROM (.*)$", text, re.MULTILINE) == [
            "${BUILD_IMAGE:-${BASE_IMAGE}} AS build", "${BASE_IMAGE}"
        ]  # fmt: skip


def test_every_variable_is_told_of() -> None:
    """The table of docs/operations.md has every variable, as the file promises."""
    table = [line for line in (ROOT / "docs" / "operations.md").read_text().splitlines() if line.startswith("| `")]
    told = {name for line in table for name in re.findall(r"`(\w+)`", line)}
    told |= {f"OUTRIDER{name}" for name in told if name.startswith("_")}
    read = {name for path in FILES for name in re.findall(r"\$\{(\w+)", path.read_text())}
    assert read <= told


@pytest.mark.parametrize("name", [name for name in OURS if not name.startswith("envoy")])
def test_commands_are_taken(name: str) -> None:
    """Every flag is one that the service has, with a value that it takes."""
    command, *words = map(filled_in, SERVICES[name]["command"])
    COMMANDS[command].parse(words)


@pytest.mark.parametrize(("algorithm", "model"), [("NGRAM", ""), ("EAGLE3", "a/head"), ("NEXTN", "")])
def test_gpu_drafters_of_every_kind(algorithm: str, model: str) -> None:
    given = {"OUTRIDER_ALGORITHM": algorithm, "OUTRIDER_DRAFT_MODEL": model, "OUTRIDER_MODEL": "a/target"}
    words = [
        re.sub(r"\$\{(\w+)(:?)-([^}]*)\}", lambda found: given.get(found[1], found[3]), word)
        for word in SERVICES["draft-gpu"]["command"][1:]
    ]
    args = DraftArgs.parse(words)
    assert (args.model_path, args.speculative_algorithm) == ("a/target", algorithm)
    assert (args.speculative_draft_model_path or "") == model
    if algorithm == "NGRAM":  # others look at the model
        assert describe_drafter(args) == {"algorithm": "NGRAM", "features": "none"}


@pytest.mark.parametrize("name", [name for name in OURS if name.startswith("envoy")])
def test_envoy_takes_its_command(name: str, tmp_path: Path) -> None:
    pytest.importorskip("envoy")
    words = [filled_in(word).replace("/tmp/envoy", str(tmp_path)) for word in SERVICES[name]["command"]]
    script = ROOT / "deploy" / "envoy" / "run.py"
    ended = subprocess.run([sys.executable, script, *words, "--check"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    "address", ["foo", "foo:bar", ":8000", "foo:0", "foo:65536", "foo:80:80", "::1:8000", "a b:80"]
)
def test_envoy_refuses_what_is_no_address(address: str, tmp_path: Path) -> None:
    words = [f"--gateway={address}", f"--run-dir={tmp_path}", "--check"]
    script = ROOT / "deploy" / "envoy" / "run.py"
    ended = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == f"run.py: error: --gateway is {address!r}; it must be HOST:PORT"


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
    """The gateway's image gets no torch, and an extra of extras is resolved."""
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
    """Each target GPU gets a verify service, and none of them a drafter."""
    script = ROOT / "deploy" / "gpus.py"
    words = ["--targets", "0", "2", "3", "--drafters", "1", "4"]
    made = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, check=True)
    services = yaml.safe_load(made.stdout)["services"]
    gpus = {name: s["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for name, s in services.items()}
    assert gpus == {"verify-gpu-2": ["2"], "verify-gpu-3": ["3"], "draft-gpu-4": ["4"]}
    assert services["verify-gpu-2"]["command"] == SERVICES["verify-gpu"]["command"]
    made = subprocess.run([sys.executable, script, *words, "--tls"], capture_output=True, text=True, check=True)
    safe = yaml.safe_load(made.stdout)["services"]
    for name, first in (("verify-gpu-2", "verify-gpu"), ("verify-gpu-3", "verify-gpu"), ("draft-gpu-4", "draft-gpu")):
        for key in ("entrypoint", "secrets"):
            assert safe[name][key] == TLS["services"][first][key]
        assert safe[name]["volumes"] == [*services[name]["volumes"], *TLS["services"][first]["volumes"]]
        assert safe[name]["healthcheck"] == {**services[name]["healthcheck"], **TLS["services"][first]["healthcheck"]}
    twice = subprocess.run([sys.executable, script, *words, "0"], capture_output=True, text=True, check=False)
    assert twice.returncode == 2
    below = subprocess.run([sys.executable, script, *words[:2], "-1", *words[4:]], stderr=subprocess.PIPE, check=False)
    assert below.returncode == 2
    assert b"GPUs are numbered from 0" in below.stderr


def test_without_pyyaml_a_line_says_so(tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text("raise ModuleNotFoundError(name='yaml')")
    words = [ROOT / "deploy" / "gpus.py", "--targets", "0", "--drafters", "1"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "gpus.py: needs PyYAML: pip install pyyaml\n"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that deploy/certificates.sh makes, as root would on a server."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("made") / "tls"
    renew(folder)
    return folder


def renew(folder: Path) -> None:
    """Runs the script."""
    script = ROOT / "deploy" / "certificates.sh"
    subprocess.run([script, folder, "outrider.example", "10.1.2.3"], check=True, capture_output=True)


def flags_of(name: str, folder: Path) -> list[str]:
    """The flags that docker-compose.tls.yml adds to a service's command, with the files that the script made."""
    shell, option, script, _ = TLS["services"][name]["entrypoint"]
    assert (shell, option) == ("sh", "-c")
    start, _, flags = script.partition('"$$@"')
    assert start.split()[0] == "exec"  # signals reach the service
    return [in_folder(word, name, folder) for word in flags.split()]


def in_folder(word: str, name: str, folder: Path) -> str:
    """Where a mounted file is on this machine."""
    for secret in TLS["services"][name].get("secrets", ()):
        path = filled_in(TLS["secrets"][secret]["file"]).replace("./deploy/tls", str(folder))
        word = word.replace(f"/run/secrets/{secret}", path) if word.endswith(f"/{secret}") else word
    for volume in TLS["services"][name]["volumes"]:
        assert volume["read_only"]
        word = word.replace(volume["target"], filled_in(volume["source"]).replace("./deploy/tls", str(folder)))
    return word


@pytest.mark.parametrize("name", [name for name in OURS if not name.startswith("envoy")])
def test_services_with_tls(name: str, certificates: Path) -> None:
    """A service takes its flags with the files made, its health check gets in with them, and it asks for tokens."""
    command, *words = map(filled_in, SERVICES[name]["command"])
    args = COMMANDS[command].parse([*words, *flags_of(name, certificates)])
    assert args.ssl_ca_certs is not None
    assert args.token_file is not None
    assert len(Path(args.token_file).read_text().strip()) == 64
    files = server_files(args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs)
    assert files is not None
    files.read()
    test = [in_folder(word, name, certificates) for word in TLS["services"][name]["healthcheck"]["test"]]
    assert test[:3] == ["CMD", "outrider", "health"]
    health = HealthArgs.parse(test[3:])
    old = HealthArgs.parse(SERVICES[name]["healthcheck"]["test"][3:])
    assert (health.address, health.url) == (old.address, tuple(url.replace("http:", "https:") for url in old.url))
    assert health.verify_tls is not None
    shake_hands(http_context(files), client_context(health.verify_tls), "127.0.0.1")
    if isinstance(args, VerifyArgs):
        assert args.admin_token_file is not None
        assert Path(args.admin_token_file).read_text() != Path(args.token_file).read_text()
        return
    if isinstance(args, GatewayArgs):
        assert args.api_key_file is not None
    assert args.verify_tls is not None
    verify = VerifyArgs.parse(flags_of("verify", certificates))
    theirs = server_files(verify.ssl_certfile, verify.ssl_keyfile, verify.ssl_ca_certs)
    assert theirs is not None
    host = args.verify_address[0].rpartition(":")[0]
    shake_hands(http_context(theirs), client_context(args.verify_tls), host)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake_hands(http_context(theirs), client_context(args.verify_tls), "gateway-service")


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    """A TLS handshake in memory; SSLError when one does not like the other."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname=name), server.wrap_bio(to_server, to_client, True)
    ]  # fmt: skip
    for _ in range(4):
        for side in sides:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    assert all(side.version() for side in sides)


@pytest.mark.parametrize("name", ["envoy", "envoy-gpu"])
def test_envoy_with_tls(name: str, certificates: Path, tmp_path: Path) -> None:
    pytest.importorskip("envoy")
    words = [filled_in(word).replace("/tmp/envoy", str(tmp_path)) for word in SERVICES[name]["command"]]
    words += flags_of(name, certificates)
    script = ROOT / "deploy" / "envoy" / "run.py"
    ended = subprocess.run([sys.executable, script, *words, "--check"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    made = (tmp_path / "envoy.yaml").read_text()
    assert made.count('"name": "envoy.transport_sockets.tls"') == 5  # in front, and of two clusters of each kind


def test_every_service_gets_tls() -> None:
    assert set(TLS["services"]) == set(OURS)
    for name, service in TLS["services"].items():
        assert set(service) <= {"entrypoint", "volumes", "secrets", "healthcheck"}
        assert service["volumes"][0]["source"].endswith("/" + name.removesuffix("-gpu"))  # no other's key


def test_certificates_are_renewed_and_secrets_stay(certificates: Path) -> None:
    before = {path: path.read_bytes() for path in certificates.rglob("*") if path.is_file()}
    renew(certificates)
    changed = {str(path.relative_to(certificates)) for path, content in before.items() if path.read_bytes() != content}
    assert changed == {
        f"{name}/{file}.pem" for name in ("verify", "draft", "gateway", "envoy", "front") for file in ("cert", "key")
    }
    assert {path for path in certificates.rglob("*") if path.is_file()} == before.keys()
    assert (certificates.stat().st_mode & 0o777, (certificates / "authority").stat().st_mode & 0o777) == (0o700, 0o700)
    text = ["openssl", "x509", "-noout", "-ext", "subjectAltName", "-in", certificates / "front" / "cert.pem"]
    names = subprocess.run(text, check=True, capture_output=True, text=True).stdout
    assert "DNS:outrider.example" in names
    assert "IP Address:10.1.2.3" in names


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="needs docker-compose")
@pytest.mark.parametrize("profile", ["cpu", "gpu", "monitoring"])
@pytest.mark.parametrize("files", [FILES[:1], FILES], ids=["plain", "tls"])
def test_docker_compose_takes_it(profile: str, files: list[Path]) -> None:
    """docker-compose accepts the files; GPUs are reserved as Docker's schema demands."""
    words = [word for path in files for word in ("--file", str(path))]
    command = ["docker-compose", "--project-directory", str(ROOT), *words, "--profile", profile, "config"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    services = yaml.safe_load(ended.stdout)["services"]
    if profile != "gpu":
        return
    for name, gpu in (("verify-gpu", "0"), ("draft-gpu", "1")):
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "device_ids": [gpu], "capabilities": ["gpu"]}
