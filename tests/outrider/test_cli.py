from __future__ import annotations

import importlib.metadata
import os
import resource
import signal
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

import outrider
from outrider import cli
from outrider.args import VerifyArgs
from outrider.errors import StartupError, Unfinished

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fake_verify(monkeypatch: pytest.MonkeyPatch) -> list[VerifyArgs]:
    """Stands in for verify_service.app: records its settings, and fails for some model paths."""
    seen: list[VerifyArgs] = []

    def main(args: VerifyArgs) -> int:
        seen.append(args)
        if args.model_path == "nowhere":
            raise StartupError("there is no model nowhere")
        if args.model_path == "half":
            raise Unfinished("half is not whole")
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


def test_a_command_may_open_as_many_files_as_the_system_allows(fake_verify: list[VerifyArgs]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        assert cli.main(["verify"]) == 7
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 65_536), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("command", ["serve", "verify", "draft", "gateway", "colocated"])
def test_what_serves_says_that_it_may_open_too_few_files(command: str) -> None:
    """In a process of its own, as what was lowered as a whole stays so."""
    words = {"gateway": ["--verify-address=127.0.0.1:1"], "colocated": ["--"]}.get(command, [])
    script = f"""
import resource, sys
from outrider import cli
resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
sys.exit(cli.main({[command, *words]!r}))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    told = f"outrider {command}: the limit of open files (ulimit -n) is 20; at least 128 are needed\n"
    assert (ended.returncode, ended.stderr) == (2, told)


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


def test_what_cannot_finish_says_so_and_exits_with_1(
    fake_verify: list[VerifyArgs], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", "--model-path=half"]) == 1
    assert capsys.readouterr().err == "outrider verify: half is not whole\n"


def test_interrupted(fake_verify: list[VerifyArgs]) -> None:
    assert cli.main(["verify", "--model-path=interrupted"]) == 130


def test_a_setting_out_of_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--max-running-requests=0"]) == 2
    assert "--max-running-requests is 0; it must be at least 1" in capsys.readouterr().err


@pytest.fixture
def no_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logging is set up for a whole process, and this one goes on."""
    for module in ("outrider.launcher", "gateway.app", "verify_service.app", "draft_service.app"):
        monkeypatch.setattr(f"{module}.configure_logging", lambda service: None)


@pytest.mark.usefixtures("no_logs")
@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["health", "--address=127.0.0.1:86837"], "--address is '127.0.0.1:86837'; it must be host:port"),
        (["health", "--address=127.0.0.1"], "--address is '127.0.0.1'; it must be host:port"),
        (["health", "--address=http://127.0.0.1:1"], "--address is 'http://127.0.0.1:1'; it must be host:port"),
        (["health", "--address=a..b:1"], "--address is 'a..b:1'; between its dots a host's name has 1 to 63"),
        (["drafters", "list", "--verify-address="], "--verify-address is ''; it must be host:port"),
        (["drafters", "list", "--verify-address=abc:86837"], "--verify-address is 'abc:86837'"),
        (["verify", "--listen="], "--listen is ''; it must be host:port"),
        (["draft", "--listen="], "--listen is ''; it must be host:port"),
        (["serve", "--grpc-address="], "--grpc-address is ''; it must be host:port"),
        (["serve", "--grpc-address=127.0.0..1:21337"], "--grpc-address is '127.0.0..1:21337'; between its dots"),
        (["serve", "--port=0", "--host=127.0.0..1"], "cannot listen on 127.0.0..1:0: no host has such a name"),
        (["serve", "--port=0", "--metrics-host=127.0.0..1"], "cannot listen on 127.0.0..1:0: no host has such a name"),
        (["gateway", "--port=0", "--host=foo..bar"], "cannot listen on foo..bar:0: no host has such a name"),
        (["draft", "--verify-address=127.0.0.1:99999"], "--verify-address is '127.0.0.1:99999'"),
        (["draft", "--verify-address=file:/x"], "--verify-address is 'file:/x'; it must be host:port"),
        (["draft", "--verify-address="], "--verify-address is ''; it must be host:port"),
        (["gateway", "--verify-address=file:"], "--verify-address is 'file:'; a path must follow"),
        (["health", "--address=\udcff:1"], "--address is not valid UTF-8"),
        (["drafters", "list", "--verify-address=unix:/tmp/\udcff"], "--verify-address is not valid UTF-8"),
        (["drafters", "drain", "--drafter=\udcff"], "--drafter is not valid UTF-8"),
        (["serve", "--grpc-address=\udcff:1"], "--grpc-address is not valid UTF-8"),
        (["gateway", "--verify-address=\udcff:1"], "--verify-address is not valid UTF-8"),
        (["draft", "--verify-address=\udcff:1"], "--verify-address is not valid UTF-8"),
        (["drafters", "list", "--timeout-s=1e300"], "--timeout-s is 1e+300; it must be at most 1000000"),
        (["serve", "--shutdown-grace-s=1e300"], "--shutdown-grace-s is 1e+300; it must be at most 1000000"),
        (["verify", "--max-draft-wait-ms=1e300"], "--max-draft-wait-ms is 1e+300; it must be at most 1000000000"),
        (["colocated", "--listen=127.0.0.1:0", "--"], "--listen is '127.0.0.1:0'; it must be host:port"),
        (["version", "extra"], "it takes no words, not 'extra'"),
    ],
)
def test_mistyped_words_are_refused_in_a_line(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err.startswith(f"outrider {words[0]}: {complaint}")


@pytest.mark.usefixtures("no_logs")
@pytest.mark.parametrize(
    ("flag", "content", "complaint"),
    [
        ("--model-path", "", ", a file; a Hugging Face folder is needed"),
        ("--api-key-file", None, "cannot read --api-key-file: "),
        ("--api-key-file", "# none\n", " has no key"),
        ("--api-key-file", "clé", "can't decode byte"),
        ("--api-key-file", "key requests_per_minute=nan", "line 1: settings are name=TEXT"),
    ],
)
def test_files_that_a_part_cannot_use_end_serve_before_it_starts_one(
    flag: str, content: str | None, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    if content is None:
        path.mkdir()
    else:
        path.write_text(content, encoding="latin-1")
    assert cli.main(["serve", "--startup-timeout-s=1", f"{flag}={path}"]) == 2
    assert complaint in capsys.readouterr().err


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


INTERRUPTED = """
import os, signal, sys
from importlib.abc import MetaPathFinder

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has ignored it for what it runs behind it

class Interrupting(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "outrider.args":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.argv[1:] = ["serve"]
START
"""


@pytest.mark.parametrize("start", ["console script", "python -m"])
def test_interrupted_while_it_loads_it_says_nothing(start: str) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["outrider"].partition(":")
    lines = {
        "console script": f"from {module} import {function}; sys.exit({function}())",
        "python -m": "import runpy; runpy.run_module('outrider', run_name='__main__')",
    }
    code = INTERRUPTED.replace("START", lines[start])
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


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


def test_a_path_that_is_too_long_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", f"--model-path=/{'x' * 5000}"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("outrider verify: File name too long: /xxx")


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
