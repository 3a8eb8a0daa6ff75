"""Every environment variable that Outrider reads, with its type and default. Nothing else reads os.environ.

What libraries read is set before they are imported: gRPC's and OpenMP's in outrider/__init__.py, numba's in
draft_service/app.py.
"""

from __future__ import annotations

import os
from pathlib import Path

from outrider.errors import StartupError


def home() -> Path:
    """OUTRIDER_HOME: where models and compiled kernels are cached; default: `outrider` below the XDG cache folder."""
    given = os.environ.get("OUTRIDER_HOME")
    try:
        if given:
            return Path(given).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"
    except RuntimeError as error:  # no such user, or one without a home
        named = f"OUTRIDER_HOME is {given!r}" if given else "neither OUTRIDER_HOME nor XDG_CACHE_HOME is set"
        raise StartupError(f"{named}: {error}") from error


def cpu_kernel() -> bool:
    """OUTRIDER_CPU_KERNEL: false keeps to torch's own operators on CPU; default true."""
    return flag("OUTRIDER_CPU_KERNEL", True)


def log_level() -> str:
    """OUTRIDER_LOG_LEVEL: debug, info, warning or error; default info."""
    level = (os.environ.get("OUTRIDER_LOG_LEVEL") or "info").lower()
    if level not in {"debug", "info", "warning", "error"}:
        raise StartupError(f"OUTRIDER_LOG_LEVEL is {level!r}; it must be debug, info, warning or error")
    return level


_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def early_proposals() -> bool | None:
    """OUTRIDER_ENABLE_SPEC_V2, or SGLang's name for it: draft for a step's likely outcomes while it runs.

    None, for `auto` and where neither is set: where that is found to pay.
    """
    ours, theirs = (
        os.environ.get(name, "").strip().lower() for name in ("OUTRIDER_ENABLE_SPEC_V2", "SGLANG_ENABLE_SPEC_V2")
    )
    if ours == "auto" or not (ours or theirs):
        return None
    if ours not in {"", *_WORDS}:
        raise StartupError(f"OUTRIDER_ENABLE_SPEC_V2 is {ours!r}; it must be 1, 0 or auto")
    return flag("OUTRIDER_ENABLE_SPEC_V2", sglang_spec_v2())


def sglang_spec_v2() -> bool:
    """SGLANG_ENABLE_SPEC_V2, where ours does not decide: with it goes SGLang's rule that a topk that is given is 1."""
    return not os.environ.get("OUTRIDER_ENABLE_SPEC_V2", "").strip() and flag("SGLANG_ENABLE_SPEC_V2", False)


def ngram_force_greedy_verify() -> bool:
    """OUTRIDER_NGRAM_FORCE_GREEDY_VERIFY, or SGLang's name for it: n-gram drafters' sessions decode greedily."""
    theirs = flag("SGLANG_NGRAM_FORCE_GREEDY_VERIFY", False)
    return flag("OUTRIDER_NGRAM_FORCE_GREEDY_VERIFY", theirs)


def flag(name: str, default: bool) -> bool:
    """A boolean variable: 1/true/yes/on or 0/false/no/off."""
    value = os.environ.get(name, "").strip().lower()
    if value in {"", *_WORDS}:
        return _WORDS.get(value, default)
    raise StartupError(f"{name} is {value!r}; it must be 1 or 0 (or true, yes, on; false, no, off)")


def check() -> None:
    """StartupError for a variable of the services that has a value it cannot have."""
    cpu_kernel()
    early_proposals()
    ngram_force_greedy_verify()


def runtime_dir() -> Path | None:
    """XDG_RUNTIME_DIR: where sockets of this user go; default: none."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    return Path(given) if given else None


def for_child(*, grpc_speaks: bool = False) -> dict[str, str]:
    """The environment of a child process: ours, and OUTRIDER_PARENT_PID, this process's id.

    GRPC_VERBOSITY, unless it is set, keeps gRPC's own chatter (a peer that left) out of our output; `grpc_speaks`
    leaves it in, for who must hear of handshakes that fail.
    """
    quiet = {} if grpc_speaks else {"GRPC_VERBOSITY": "ERROR"}
    return {**quiet, **os.environ, "OUTRIDER_PARENT_PID": str(os.getpid())}


def for_worker() -> dict[str, str]:
    """The environment of a worker (isolated.py): LD_LIBRARY_PATH alone, without which a Python may not start."""
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}


def take_parent_pid() -> int | None:
    """OUTRIDER_PARENT_PID: the supervisor that started this process; read once, so that no grandchild sees it."""
    value = os.environ.pop("OUTRIDER_PARENT_PID", None)
    return int(value) if value else None


def no_color() -> bool:
    """NO_COLOR: set to anything, output is never coloured."""
    return bool(os.environ.get("NO_COLOR"))


def dumb_terminal() -> bool:
    """TERM: unset or `dumb`, a terminal moves no cursor."""
    return os.environ.get("TERM", "") in {"", "dumb"}


def demo_once() -> bool:
    """DEMO_ONCE: the demo ends after its answer; default false."""
    return flag("DEMO_ONCE", False)
