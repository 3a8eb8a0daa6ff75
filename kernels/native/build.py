"""Compiles the C kernels for the machine at hand, once, and loads them.

The library lies in a cache folder under a name made of its sources, the compiler and its flags and the CPU, so that a
newer version, or another machine on a shared disk, makes its own; and of its bytes, so that one that a full disk or a
power cut left damaged is known, and made anew. Who cannot write there loads what it compiled, and keeps nothing; what
cannot be run there is loaded from the temporary folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import itertools
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Self

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
KERNELS = tuple(sorted(SOURCES.glob("*.c")))
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fno-math-errno")
# Spelled differently by compilers and CPUs; the first one that the compiler knows is taken. On x86 gcc knows the second
# too, and means nothing by it.
NATIVE_FLAGS = (("-march=native",), *([] if platform.machine() in {"x86_64", "AMD64"} else [("-mcpu=native",)]), ())
# gcc tears some chains of fused multiplications and additions apart on AMD's CPUs, by how many sums go side by side: a
# row's bits would depend on the rows beside it. Compilers that do not know this need not be told.
ALWAYS_FUSED = (("--param=avoid-fma-max-bits=0",), ())
COMPILERS = ("cc", "gcc", "clang")
PROBE_TIMEOUT_S = 20
COMPILE_TIMEOUT_S = 300


class CannotBuild(Exception):
    """There is no C compiler, or it failed; the message says which."""


@dataclass(frozen=True)
class Compiler:
    """A C compiler that works, and which flags it knows of those that are wanted."""

    path: str
    version: str
    fused: tuple[str, ...]
    instructions: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """Without files."""
        return [self.path, *FLAGS, *self.fused, *self.instructions]


@cache
def load_library(
    cache_folder: Path, sources: tuple[Path, ...] = KERNELS, *, max_compilers: int | None = None
) -> ctypes.CDLL:
    """The compiled kernels, or these C files, which may include their headers.

    Of processes that find none in the folder one compiles, and the others wait for it. max_compilers: see
    compile_library. Raises CannotBuild; OSError for a library that cannot be loaded, or no temporary folder. An
    exception meanwhile in the thread that called, as a signal's handler raises it, ends the compilers.
    """
    compiler = find_compiler()
    name = f"outrider-{_key(compiler, sources)}"
    library = _find(cache_folder, name)
    if library is not None:
        return _loaded(library)
    with _locked(cache_folder), tempfile.TemporaryDirectory(prefix="outrider-") as building:
        library = _find(cache_folder, name)  # another process may have made it meanwhile
        if library is None:
            library = _kept(compile_library(compiler, Path(building), name, sources, max_compilers), cache_folder)
        return _loaded(library)


def build_key(library: ctypes.CDLL) -> str:
    """What the library was made of, as sixteen hex digits."""
    return Path(library._name).stem.split("-")[1]


def find_compiler() -> Compiler:
    """The first C compiler that works. Raises CannotBuild."""
    failed: list[str] = []
    for name in COMPILERS:
        path = shutil.which(name)
        if path is None:
            continue
        try:
            version = _run([path, "--version"], PROBE_TIMEOUT_S)
            return Compiler(path, version, *_known_flags(path))
        except CannotBuild as error:
            failed.append(str(error))
    raise CannotBuild("; ".join(failed) or f"no C compiler ({', '.join(COMPILERS)}) was found")


def compile_library(
    compiler: Compiler,
    folder: Path,
    name: str,
    sources: Sequence[Path] = KERNELS,
    max_compilers: int | None = None,
) -> Path:
    """Compiles in `folder`, to a file whose name ends in its digest. Raises CannotBuild.

    max_compilers: files compiled at once, of 100 MiB each or so; None: one a core.
    """

    running = _Running(folder)

    def run(*words: str) -> None:
        running.run([*compiler.command, *words], COMPILE_TIMEOUT_S)

    library, objects = folder / "library.so", [folder / f"{number}.o" for number in range(len(sources))]
    with ThreadPoolExecutor(max_compilers or os.cpu_count()) as pool, running:
        list(pool.map(lambda source, made: run(f"-I{SOURCES}", "-c", str(source), "-o", str(made)), sources, objects))
        run("-shared", *map(str, objects), "-o", str(library), "-lm", "-lpthread")
    return library.rename(folder / f"{name}-{_digest(library)}.so")


def _find(folder: Path, name: str) -> Path | None:
    """The library of that name, if the folder has it undamaged."""
    for found in sorted(folder.glob(f"{name}-*.so")):
        with contextlib.suppress(OSError):  # another process saw that it is damaged, or it is not ours
            if found.stem == f"{name}-{_digest(found)}":
                return found
            found.unlink()  # mapped, one that was cut off would end the process
    return None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Makes the folder and holds a lock on it, where that can be: without, two may compile, and do no harm."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY)
            held.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.warning("waiting for another process that compiles in %s", folder)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _kept(library: Path, folder: Path) -> Path:
    """The library's copy in the folder, which gets all of it or nothing; itself, with a warning, where it gets none."""
    try:
        for left in folder.glob(".building-*"):  # by who was killed
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as beside:
            return Path(shutil.copy(library, beside)).replace(folder / library.name)
    except OSError as error:
        log.warning("compiled code is not kept, so the next start compiles again: %s", error)
        return library


def _loaded(library: Path) -> ctypes.CDLL:
    """The library; or a copy of it, where its folder is mounted so that nothing there may be run (noexec)."""
    try:
        return ctypes.CDLL(str(library))
    except OSError:
        with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
            return ctypes.CDLL(shutil.copy(library, folder))


def _known_flags(path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those of ALWAYS_FUSED and of NATIVE_FLAGS that the compiler at `path` knows. CannotBuild: it knows nothing.

    Asked with an empty file: one that fails over the kernels' own, as for want of memory, is not given fewer flags.
    """
    error = CannotBuild()
    for instructions, fused in itertools.product(NATIVE_FLAGS, ALWAYS_FUSED):
        command = [path, *FLAGS, *fused, *instructions, "-fsyntax-only", "-x", "c", os.devnull]
        try:
            _run(command, PROBE_TIMEOUT_S)
        except CannotBuild as failed:
            error = failed
        else:
            return fused, instructions
    raise error


def _run(command: list[str], timeout_s: float) -> str:
    with _Running() as running:
        return running.run(command, timeout_s)


class _Running:
    """Compilers that run, maybe in threads. None outlives the block, which a failure or a signal may end early."""

    def __init__(self, temporary: Path | None = None) -> None:
        self._environment = os.environ if temporary is None else os.environ | {"TMPDIR": str(temporary)}
        self._lock = Lock()
        self._groups: set[int] = set()
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._ended = True
            for group in tuple(self._groups):
                _kill(group)

    def run(self, command: list[str], timeout_s: float) -> str:
        """What the compiler prints. CannotBuild where it cannot be run, fails, or does not end."""
        try:
            with self._started(command) as process:
                try:
                    said, complaint = process.communicate(timeout=timeout_s)
                finally:
                    _kill(process.pid)  # with what a compiler starts
                    self._groups.discard(process.pid)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotBuild(f"{command[0]} could not be run: {error}") from error
        if process.returncode != 0:
            reason = complaint.strip()[-2000:] or f"exit code {process.returncode}"  # warnings come first
            raise CannotBuild(f"{command[0]} failed: {reason}")
        return said

    def _started(self, command: list[str]) -> subprocess.Popen[str]:
        with self._lock:
            if self._ended:
                raise CannotBuild("another compiler failed, or all were told to end")
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
                errors="replace", env=self._environment, process_group=0,
            )  # fmt: skip
            self._groups.add(process.pid)
        return process


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _key(compiler: Compiler, sources: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in [*sources, *sorted(SOURCES.glob("*.h"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update("\0".join([*compiler.command, compiler.version, _cpu()]).encode())
    return digest.hexdigest()[:16]


def _digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()[:16]


def _cpu() -> str:
    """What decides which instructions `native` means."""
    words = [platform.system(), platform.machine(), platform.processor()]
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return " ".join(words)
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return " ".join(words + sorted({line for line in lines if line.startswith(wanted)}))
