from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
import types

import pytest

import outrider
from outrider import cli
from outrider.args import VerifyArgs
from outrider.errors import StartupError


@pytest.fixture
def fake_verify(monkeypatch: pytest.MonkeyPatch) -> list[VerifyArgs]:
    """Stands in for verify_service.app: records its settings, and fails for the model path `nowhere`."""
    seen: list[VerifyArgs] = []

    def main(args: VerifyArgs) -> int:
        seen.append(args)
        if args.model_path == "nowhere":
            raise StartupError("there is no model nowhere")
        if args.model_path == "interrupted":
            raise KeyboardInterrupt
        return 7

    module = types.ModuleType("verify_service.app")
    module.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verify_service.app", module)
    return seen


def test_help_has_a_line_for_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(cli.COMMANDS)
    assert cli.main([]) == 0


@pytest.mark.parametrize("command", ["serve", "verify", "draft", "gateway", "chat"])
def test_every_command_explains_its_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: outrider {command} [FLAGS]" in capsys.readouterr().out


def test_two_services_of_one_process_explain_their_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["colocated", "--help"]) == 0
    assert "usage: outrider colocated VERIFY_FLAGS -- DRAFT_FLAGS" in capsys.readouterr().out


def test_help_loads_no_torch_and_no_service() -> None:
    script = """
import sys
from outrider import cli
for words in ([], ["serve", "--help"], ["verify", "--help"], ["bench"], ["version"]):
    try:
        cli.main(words)
    except SystemExit:
        pass
heavy = {"torch", "numba", "openai", "transformers", "verify_service", "draft_service", "gateway", "engine", "bench"}
sys.exit(", ".join(heavy & sys.modules.keys()) or 0)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("words", [["version"], ["--version"]])
def test_version(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    assert capsys.readouterr().out == f"outrider {outrider.__version__} (wire version 1)\n"


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fly"]) == 2
    assert "there is no command 'fly'" in capsys.readouterr().err


def test_a_command_runs_its_module_with_its_settings(fake_verify: list[VerifyArgs]) -> None:
    assert cli.main(["verify", "--dtype=float32"]) == 7
    assert fake_verify == [VerifyArgs(dtype="float32")]


def test_what_cannot_start_says_so_and_exits_with_2(
    fake_verify: list[VerifyArgs], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", "--model-path=nowhere"]) == 2
    assert capsys.readouterr().err == "outrider verify: there is no model nowhere\n"


def test_interrupted(fake_verify: list[VerifyArgs]) -> None:
    assert cli.main(["verify", "--model-path=interrupted"]) == 130


def test_a_setting_out_of_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--max-running-requests=0"]) == 2
    assert "--max-running-requests is 0; it must be at least 1" in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(name: str) -> types.ModuleType:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(cli.importlib, "import_module", missing)
    assert cli.main(["verify"]) == 2
    message = capsys.readouterr().err
    assert "'torch'" in message
    assert "in a checkout, `pip install '.[all]'`" in message


def test_the_hugging_face_kernels_package_is_refused(
    fake_verify: list[VerifyArgs], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.metadata.version

    def version(name: str) -> str:
        return "0.9.0" if name == "kernels" else found(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert cli.main(["verify"]) == 2
    assert "`kernels` (0.9.0) is installed" in capsys.readouterr().err
    assert fake_verify == []


def test_benchmarks_are_listed_and_unknown_ones_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == 0
    assert "usage: outrider bench NAME" in capsys.readouterr().out
    assert cli.main(["bench", "nothing"]) == 2
    assert "there is no benchmark 'nothing'" in capsys.readouterr().err


def test_python_dash_m_is_the_same_command() -> None:
    ended = subprocess.run([sys.executable, "-m", "outrider", "version"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout[:9]) == (0, "outrider ")


@pytest.mark.parametrize("words", [["--help"], ["version"], ["bench"]])
def test_whoever_reads_the_output_may_leave(words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(
        [sys.executable, "-m", "outrider", *words], stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_full_disk_is_told_in_a_line() -> None:
    for words in (["--help"], ["serve", "--help"]):
        with open("/dev/full", "w") as full:
            ended = subprocess.run(
                [sys.executable, "-m", "outrider", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        assert (ended.returncode, ended.stderr) == (1, f"outrider {words[0]}: No space left on device\n")


def test_wrong_words_end_with_2_though_nobody_can_be_told() -> None:
    with open("/dev/full", "w") as full:
        assert subprocess.call([sys.executable, "-m", "outrider", "gateway", "--bogus"], stderr=full) == 2


NUMBERS = """
import os, sys, types
from outrider import cli
from outrider.supervisor import Supervisor
from outrider.telemetry import configure_logging, get_logger

def run(args):
    configure_logging("verify")
    Supervisor([], startup_timeout_s=1, stop_timeout_s=1).say("said")
    print("more \\u20ac")
    return os.open(os.devnull, os.O_RDONLY)

sys.modules["verify_service.app"] = types.SimpleNamespace(main=run)
sys.exit(cli.main(["verify"]))
"""


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_streams_may_be_closed(closed: str) -> None:
    """What a command opens takes the place of none of them."""
    shell = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, NUMBERS]
    assert subprocess.run(shell, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 3


def test_a_terminal_that_lacks_characters_gets_others() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", NUMBERS], env={**os.environ, "PYTHONIOENCODING": "latin-1"}, capture_output=True,
        check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (3, b"more \\u20ac\n")


def test_top_needs_somewhere_to_show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert cli.main(["top"]) == 2
    assert capsys.readouterr().err == "outrider top: stdout is closed\n"
