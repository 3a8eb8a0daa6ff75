"""The `outrider` command. Imports neither torch nor a service: what a command needs is loaded when it runs."""

from __future__ import annotations

import ast
import contextlib
import errno
import importlib
import importlib.metadata
import importlib.util
import io
import os
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import outrider
from outrider.args import ChatArgs, ConvertArgs, DraftArgs, GatewayArgs, HealthArgs, ServeArgs, VerifyArgs
from outrider.args.top import TopArgs
from outrider.descriptors import raise_limit
from outrider.errors import StartupError
from outrider.flags import Args
from outrider.supervisor import die_with_parent
from outrider.terminal import shown_text
from outrider.wire import WIRE_VERSION

_OURS = frozenset((
    "outrider", "kernels", "engine", "verify_service", "draft_service", "gateway", "training", "bench", "tests",
))  # fmt: skip


@dataclass(frozen=True)
class Command:
    """One word after `outrider`: what it is for and what runs it."""

    summary: str
    run: Callable[[list[str]], int]


def _of(settings: type[Args], module: str) -> Command:
    """A command whose words make `settings`, handed to `main` of a module."""

    def run(words: list[str]) -> int:
        args = settings.parse(words)
        refuse_kernels_package()
        return _main_of(module, args)

    return Command(settings.summary, run)


def _main_of(module: str, words: Args | list[str]) -> int:
    with _told_what_is_missing(module):
        return importlib.import_module(module).main(words)


@contextlib.contextmanager
def _told_what_is_missing(module: str) -> Generator[None]:
    """StartupError when an extra that a module needs is not installed, whenever it is found."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in _OURS:
            raise
        raise StartupError(
            f"{module} needs the package {error.name!r}, which is not installed; "
            "in a checkout, `pip install '.[all]'` brings everything"
        ) from error


def refuse_kernels_package() -> None:
    """StartupError when the Hugging Face package `kernels` is installed beside us: its folder has our folder's name."""
    try:
        version = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return
    raise StartupError(
        f"the Hugging Face package `kernels` ({version}) is installed in this environment, and its folder collides "
        "with Outrider's own `kernels`. Uninstall it and reinstall Outrider, or give Outrider an environment of its own"
    )


def _bench(words: list[str]) -> int:
    """`outrider bench NAME ...`: main(words) of the module bench/NAME.py, in the care of bench/_main.py."""
    known = _bench_modules()
    if not words or words[0] in {"-h", "--help"} or words[0] not in known:
        wrong = bool(words) and words[0] not in {"-h", "--help"}
        lines = [f"outrider bench: there is no benchmark {words[0]!r}"] if wrong else []
        lines += ["usage: outrider bench NAME [FLAGS]", ""]
        lines += [f"  {name:<12} {summary}" for name, summary in known.items()] or ["  none is installed"]
        print("\n".join(lines), file=sys.stderr if wrong else sys.stdout)
        return 2 if wrong else 0
    module = f"bench.{words[0]}"
    with _told_what_is_missing(module):
        main = importlib.import_module(module).main
        return importlib.import_module("bench._main").ended_by_signals(main, words[1:])


def _bench_modules() -> dict[str, str]:
    """Benchmarks by name, with the first line of their docstrings; none is imported."""
    spec = importlib.util.find_spec("bench")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found: dict[str, str] = {}
    for path in sorted(path for folder in folders for path in Path(folder).glob("[!_]*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def _train(words: list[str]) -> int:
    """`outrider train COMMAND ...`: main(words) of training/app.py."""
    refuse_kernels_package()
    return _main_of("training.app", words)


def _colocated(words: list[str]) -> int:
    """`outrider colocated VERIFY_FLAGS -- DRAFT_FLAGS`."""
    if words and words[0] in {"-h", "--help"}:
        print("usage: outrider colocated VERIFY_FLAGS -- DRAFT_FLAGS\n")
        print(COMMANDS["colocated"].summary)
        return 0
    refuse_kernels_package()
    return _main_of("outrider.colocated", words)


def _drafters(words: list[str]) -> int:
    """`outrider drafters ACTION ...`."""
    return _main_of("outrider.drafters", words)


def _version(words: list[str]) -> int:
    if words and words[0] in {"-h", "--help"}:
        print(f"usage: outrider version\n\n{COMMANDS['version'].summary}")
        return 0
    if words:
        raise StartupError(f"it takes no words, not {' '.join(map(repr, words))}")
    print(f"outrider {outrider.__version__} (wire version {WIRE_VERSION})")
    return 0


GROUPS: dict[str, dict[str, Command]] = {
    "everything on this machine": {
        "serve": _of(ServeArgs, "outrider.launcher"),
        "chat": _of(ChatArgs, "outrider.chat"),
    },
    "one service": {
        "verify": _of(VerifyArgs, "verify_service.app"),
        "draft": _of(DraftArgs, "draft_service.app"),
        "gateway": _of(GatewayArgs, "gateway.app"),
        "colocated": Command(
            "Verify and draft in one process: flags of `outrider verify`, `--`, flags of `outrider draft`.", _colocated
        ),
    },
    "more": {
        "drafters": Command("Manage a verify service's drafters: list, drain, disable, enable.", _drafters),
        "health": _of(HealthArgs, "outrider.health"),
        "top": _of(TopArgs, "outrider.top"),
        "convert": _of(ConvertArgs, "engine.convert"),
        "train": Command("Make draft heads: `outrider train` lists the steps.", _train),
        "bench": Command("Measure: `outrider bench` lists what.", _bench),
        "version": Command("Print the versions of the release and of the wire.", _version),
    },
}
_MAX_ERROR_CHARS = 4000  # what a file holds may be quoted in it
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def help_text() -> str:
    """What `outrider --help` prints."""
    lines = ["usage: outrider COMMAND [FLAGS]", "", "Speculative decoding as services."]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {name:<9} {command.summary}" for name, command in commands.items()]
    return "\n".join([*lines, "", "`outrider COMMAND --help` lists the flags of a command."])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code: 2 for wrong words and what cannot start, 1 for what cannot end."""
    _ready_streams()
    raise_limit()
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else "help"
    try:
        try:
            return _run(name, words[1:])
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except StartupError as error:
        text = str(error)
        shown = text if len(text) <= _MAX_ERROR_CHARS else f"{text[:_MAX_ERROR_CHARS]} ..."
        _complain(f"outrider {name}: {shown}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has left, as `head` does
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # of a path that a flag gives
            _complain(f"outrider {name}: {error.strerror}: {str(error.filename)[:_MAX_ERROR_CHARS]}")
            return 2
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        _complain(f"outrider {name}: {error.strerror}{f': {error.filename}' if error.filename else ''}")
        return 1


def _ready_streams() -> None:
    """What is opened later gets none of the numbers 0 to 2, where others write; what an encoding lacks is escaped."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """What is left to write on stdout is no further error at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _complain(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it, or the disk is full
        print(shown_text(line), file=sys.stderr)


def _run(name: str, words: list[str]) -> int:
    if name in {"-h", "--help", "help"}:
        print(help_text())
        return 0
    name = "version" if name == "--version" else name
    if name not in COMMANDS:
        print(f"outrider: there is no command {name!r}; `outrider --help` lists them", file=sys.stderr)
        return 2
    die_with_parent()
    return COMMANDS[name].run(words)
