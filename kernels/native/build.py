"""Compiles the C kernels for the machine at hand, once, and loads them.

The library lies in a cache folder under a name made of its sources, the compiler and the CPU, so that a newer version,
or another machine on a shared disk, makes its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent
KERNELS = tuple(sorted(SOURCES.glob("*.c")))
FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-fno-math-errno"]
# Spelled differently by compilers and CPUs; the first one that compiles is taken.
NATIVE_FLAGS = (["-march=native"], ["-mcpu=native"], [])
# gcc tears some chains of fused multiplications and additions apart on AMD's CPUs, by how many sums go side by side: a
# row's bits would depend on the rows beside it. Compilers that do not know this need not be told.
ALWAYS_FUSED = (["--param=avoid-fma-max-bits=0"], [])
COMPILERS = ("cc", "gcc", "clang")
COMPILE_TIMEOUT_S = 300


class CannotBuild(Exception):
    """There is no C compiler, or it failed; the message says which."""


@cache
def load_library(cache_folder: Path, sources: tuple[Path, ...] = KERNELS) -> ctypes.CDLL:
    """The compiled kernels, or these C files, which may include their headers.

    Raises CannotBuild; OSError when the cache cannot be written.
    """
    compiler = find_compiler()
    target = cache_folder / f"outrider-{_key(compiler, sources)}.so"
    if not target.is_file():
        cache_folder.mkdir(parents=True, exist_ok=True)
        compile_library(compiler, target, sources=sources)
    return ctypes.CDLL(str(target))


def build_key(library: ctypes.CDLL) -> str:
    """What the library was made of, as sixteen hex digits."""
    return Path(library._name).stem.removeprefix("outrider-")


def find_compiler() -> str:
    """The path of a C compiler. Raises CannotBuild."""
    for name in COMPILERS:
        path = shutil.which(name)
        if path:
            return path
    raise CannotBuild(f"no C compiler ({', '.join(COMPILERS)}) was found")


def _key(compiler: str, sources: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in [*sources, *sorted(SOURCES.glob("*.h"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest.update("\0".join([compiler, version, *FLAGS, *ALWAYS_FUSED[0], _cpu()]).encode())
    return digest.hexdigest()[:16]


def _cpu() -> str:
    """What decides which instructions `native` means."""
    words = [platform.system(), platform.machine(), platform.processor()]
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return " ".join(words)
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return " ".join(words + sorted({line for line in lines if line.startswith(wanted)}))


def compile_library(
    compiler: str, target: Path, instructions: Sequence[list[str]] = NATIVE_FLAGS, sources: Sequence[Path] = KERNELS
) -> None:  # fmt: skip
    """Compiles to `target`, with the first of the sets of flags that the compiler takes. Raises CannotBuild.

    It goes into a folder beside the target, then is renamed: two first starts at once each put a whole library there.
    """
    with tempfile.TemporaryDirectory(prefix=".building-", dir=target.parent) as name:
        folder = Path(name)
        said = ""
        for flags, fused in itertools.product(instructions, ALWAYS_FUSED):
            try:
                library = _compile_and_link([compiler, *FLAGS, *fused, *flags], sources, folder)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise CannotBuild(f"{compiler} could not be run: {error}") from error
            except subprocess.CalledProcessError as error:
                said = error.stderr
                continue
            os.replace(library, target)
            return
        raise CannotBuild(f"{compiler} failed: {said.strip()[-2000:]}")  # warnings come first


def _compile_and_link(command: list[str], sources: Sequence[Path], folder: Path) -> Path:
    """All files at once, as cores allow: the first start waits for it. Raises as subprocess.run does."""

    def run(*words: str) -> None:
        subprocess.run([*command, *words], capture_output=True, text=True, check=True, timeout=COMPILE_TIMEOUT_S)

    objects = [folder / f"{number}.o" for number in range(len(sources))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source, made: run(f"-I{SOURCES}", "-c", str(source), "-o", str(made)), sources, objects))
    run("-shared", *map(str, objects), "-o", str(folder / "library.so"), "-lm", "-lpthread")
    return folder / "library.so"
