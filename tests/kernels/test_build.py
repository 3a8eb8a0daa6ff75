"""How the C kernels come to be, and that no odd compiler, killed build or damaged file is believed."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from kernels.native import build

KERNEL = "int answer(void) { return 42; }\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    if not any(map(shutil.which, build.COMPILERS)):
        pytest.skip("no C compiler")
    path = tmp_path / "answer.c"
    path.write_text(KERNEL)
    return path


def load(folder: Path, source: Path) -> ctypes.CDLL:
    build.load_library.cache_clear()
    library = build.load_library(folder, (source,))
    assert library.answer() == 42
    return library


def as_compiler(path: Path, script: str) -> str:
    """A compiler that does what the script says before it is the true one."""
    true = next(filter(None, map(shutil.which, build.COMPILERS)))
    path.write_text(f'#!/bin/sh\n{script}\nexec {true} "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("size", [0, 100, 4096, None], ids=str)
def test_a_damaged_library_is_made_anew(tmp_path: Path, source: Path, size: int | None) -> None:
    """A power cut leaves it so: empty, cut off, which ends a process that maps it, or all zeros."""
    cache, other = tmp_path / "kernels", tmp_path / "other"
    load(cache, source)
    (made,) = cache.iterdir()
    whole = made.read_bytes()
    other.mkdir()
    damaged = other / made.name
    damaged.write_bytes(whole[:size] if size is not None else bytes(len(whole)))
    load(other, source)
    assert [path.read_bytes() for path in other.iterdir()] == [whole]


def test_two_that_find_it_damaged_do_not_fail_each_other(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "kernels"
    load(cache, source)
    (made,) = cache.iterdir()
    digest = build._digest

    def other_was_sooner(path: Path) -> str:
        if path == made:
            made.unlink()
        return digest(path)

    monkeypatch.setattr(build, "_digest", other_was_sooner)
    load(cache, source)
    assert made.is_file()


def test_a_compiler_that_is_killed_once_is_not_thought_to_know_fewer_flags(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows' bits follow from the flags."""
    compiler = as_compiler(
        tmp_path / "cc", f'case "$*" in *answer.c*) mkdir {tmp_path}/killed 2>/dev/null && kill -9 $$;; esac'
    )
    monkeypatch.setattr(build, "COMPILERS", (compiler,))
    known = build.find_compiler()
    with pytest.raises(build.CannotBuild):
        load(tmp_path / "kernels", source)
    assert not list((tmp_path / "kernels").iterdir())
    load(tmp_path / "kernels", source)
    assert build.find_compiler() == known


def test_other_flags_have_another_key(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {build.build_key(load(tmp_path / "kernels", source))}
    monkeypatch.setattr(build, "NATIVE_FLAGS", ((),))
    keys.add(build.build_key(load(tmp_path / "kernels", source)))
    assert len(keys) == len(list((tmp_path / "kernels").iterdir())) == 2


@pytest.mark.parametrize(
    "script",
    ["exit 1", "exec sleep 60", r"""case "$*" in *version*) printf '\377';; *) exit 1;; esac"""],
    ids=["fails", "hangs", "babbles"],
)
def test_the_next_compiler_is_tried(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    bad, good = as_compiler(tmp_path / "bad", script), as_compiler(tmp_path / "good", "")
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler", bad, good))
    monkeypatch.setattr(build, "PROBE_TIMEOUT_S", 2.0 if "sleep" in script else 20.0)
    assert build.find_compiler().path == good
    monkeypatch.setattr(build, "COMPILERS", (bad,))
    monkeypatch.setattr(build, "PROBE_TIMEOUT_S", 0.1 if "sleep" in script else 20.0)
    with pytest.raises(build.CannotBuild, match="bad"):
        build.find_compiler()


def test_a_flag_that_a_compiler_does_not_know_is_left_out(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "ALWAYS_FUSED", (("--param=no-such-parameter=0",), ()))
    monkeypatch.setattr(build, "NATIVE_FLAGS", (("-march=no-such-cpu",), ()))
    compiler = build.find_compiler()
    assert (compiler.fused, compiler.instructions) == ((), ())
    load(tmp_path / "kernels", source)


def test_what_a_killed_build_left_is_swept_away(tmp_path: Path, source: Path) -> None:
    cache = tmp_path / "kernels"
    (cache / ".building-left").mkdir(parents=True)
    load(cache, source)
    assert not list(cache.glob(".*"))


def test_of_two_that_find_nothing_one_compiles(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, looked, lock = tmp_path / "ran", Barrier(2), fcntl.flock

    def lock_when_both_looked(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_NB:
            looked.wait(timeout=60)
        lock(descriptor, operation)

    compiler = as_compiler(tmp_path / "cc", f'case "$*" in *answer.c*) echo >> {ran};; esac')
    monkeypatch.setattr(build, "COMPILERS", (compiler,))
    monkeypatch.setattr(fcntl, "flock", lock_when_both_looked)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: load(tmp_path / "kernels", source), range(2))
    assert first._name == second._name
    assert ran.read_text() == "\n"


def test_who_waits_for_another_that_compiles_says_so(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lock, held = fcntl.flock, os.open(tmp_path, os.O_RDONLY)
    lock(held, fcntl.LOCK_EX)

    def lock_when_the_other_ends(descriptor: int, operation: int) -> None:
        if not operation & fcntl.LOCK_NB:
            os.close(held)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_when_the_other_ends)
    load(tmp_path, source)
    assert [record.message for record in caplog.records] == [f"waiting for another process that compiles in {tmp_path}"]


@pytest.mark.parametrize("fault", ["no folder", "no room", "no lock"])
def test_where_nothing_can_be_kept_the_library_is_loaded(
    tmp_path: Path, source: Path, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache, temporary = tmp_path / "kernels", tmp_path / "temporary"
    temporary.mkdir()

    def fails(*_: object) -> None:
        raise OSError("no room, or no lock")

    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    if fault == "no folder":
        cache.write_text("a file")
    else:
        monkeypatch.setattr(*{"no room": (shutil, "copy"), "no lock": (fcntl, "flock")}[fault], fails)
    with caplog.at_level(logging.WARNING):
        library = load(cache, source)
    assert len(build.build_key(library)) == 16
    assert not list(temporary.iterdir())
    assert len(list(cache.glob("*"))) == (fault == "no lock")
    assert ("compiled code is not kept" in caplog.text) == (fault != "no lock")


def test_what_a_folder_keeps_but_may_not_run_is_loaded_from_another(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, temporary, load_any = tmp_path / "kernels", tmp_path / "temporary", ctypes.CDLL
    temporary.mkdir()

    def of_noexec(path: str) -> ctypes.CDLL:
        if Path(path).parent == cache:
            raise OSError(f"{path}: failed to map segment from shared object")
        return load_any(path)

    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr(ctypes, "CDLL", of_noexec)
    first = load(cache, source)
    (kept,) = cache.iterdir()
    monkeypatch.setattr(build, "compile_library", pytest.fail)
    later = load(cache, source)
    assert list(cache.iterdir()) == [kept]
    assert build.build_key(first) == build.build_key(later)
    assert not list(temporary.iterdir())


def test_no_more_files_are_compiled_at_once_than_is_said(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true, busy = as_compiler(tmp_path / "true", ""), tmp_path / "busy"
    alone = f'mkdir {busy} || exit 1; {true} "$@"; code=$?; rmdir {busy}; exit $code'
    monkeypatch.setattr(build, "COMPILERS", (as_compiler(tmp_path / "cc", alone),))
    sources = [source, *(tmp_path / f"{number}.c" for number in range(5))]
    for other in sources[1:]:
        other.touch()
    assert build.load_library(tmp_path / "kernels", tuple(sources), max_compilers=1).answer() == 42
