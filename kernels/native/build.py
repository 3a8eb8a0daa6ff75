"""Compiles the C kernels for the machine at hand, once, and loads them.

The library lies in a cache folder under a name made of its sources, the compiler and its flags and the CPU, so that a
newer version, or another machine on a shared disk, makes its own; and of its bytes, so that one that a full disk or a
power cut left damaged is known, and made anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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
_ABANDONED_S = 3600.0  # after which a folder that was built in is nobody's


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
def load_library(cache_folder: Path, sources: tuple[Path, ...] = KERNELS) -> ctypes.CDLL:
    """The compiled kernels, or these C files, which may include their headers.

    Raises CannotBuild; OSError when the cache cannot be written.
    """
    compiler = find_compiler()
    name = f"outrider-{_key(compiler, sources)}"
    for found in sorted(cache_folder.glob(f"{name}-*.so")):
        with contextlib.suppress(FileNotFoundError):  # another process saw that it is damaged
            if found.stem == f"{name}-{_digest(found)}":
                return ctypes.CDLL(str(found))
            found.unlink()  # mapped, one that was cut off would end the process
    cache_folder.mkdir(parents=True, exist_ok=True)
    return ctypes.CDLL(str(compile_library(compiler, cache_folder, name, sources)))


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


def compile_library(compiler: Compiler, folder: Path, name: str, sources: Sequence[Path] = KERNELS) -> Path:
    """Compiles to a file in `folder` whose name ends in its digest. Raises CannotBuild.

    It goes into a folder of its own first, then is renamed: two first starts at once each put a whole library there.
    """
    _sweep(folder)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as building:
        library = _compile_and_link(compiler.command, sources, Path(building))
        target = folder / f"{name}-{_digest(library)}.so"
        os.replace(library, target)
    return target


def _known_flags(path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of ALWAYS_FUSED and of NATIVE_FLAGS, those that the compiler at `path` knows. CannotBuild: it knows nothing.

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


def _compile_and_link(command: list[str], sources: Sequence[Path], folder: Path) -> Path:
    """All files at once, as cores allow: the first start waits for it."""

    def run(*words: str) -> None:
        _run([*command, *words], COMPILE_TIMEOUT_S)

    objects = [folder / f"{number}.o" for number in range(len(sources))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source, made: run(f"-I{SOURCES}", "-c", str(source), "-o", str(made)), sources, objects))
    run("-shared", *map(str, objects), "-o", str(folder / "library.so"), "-lm", "-lpthread")
    return folder / "library.so"


def _run(command: list[str], timeout_s: float) -> str:
    """What the compiler prints. CannotBuild where it cannot be run, fails, or does not end."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace",
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"{command[0]} could not be run: {error}") from error
    if done.returncode != 0:
        said = done.stderr.strip()[-2000:] or f"exit code {done.returncode}"  # warnings come first
        raise CannotBuild(f"{command[0]} failed: {said}")
    return done.stdout


def _key(compiler: Compiler, sources: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in [*sources, *sorted(SOURCES.glob("*.h"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update("\0".join([*compiler.command, compiler.version, _cpu()]).encode())
    return digest.hexdigest()[:16]


def _digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()[:16]


def _sweep(folder: Path) -> None:
    """Removes what a build that was killed left behind."""
    for left in folder.glob(".building-*"):
        try:
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)
        except OSError:
            continue  # its builder removed it just now


def _cpu() -> str:
    """What decides which instructions `native` means."""
    words = [platform.system(), platform.machine(), platform.processor()]
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return " ".join(words)
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return " ".join(words + sorted({line for line in lines if line.startswith(wanted)}))
