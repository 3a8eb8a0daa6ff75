"""What is compiled runs, whether or not it can be kept."""

from __future__ import annotations

import errno
import os
import runpy
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from numba import config

from draft_service.drafters import compiled as module
from draft_service.drafters import trie_match
from draft_service.drafters.compiled import compiled

ROOT = Path(__file__).parents[3]
MODULE = """
from draft_service.drafters.compiled import compiled

@compiled
def double(number):
    return 2 * number

@compiled
def quadruple(number):
    return double(double(number))
"""
RUN = """
import resource, sys
from functions import quadruple
if sys.argv[1] == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
print(quadruple(3), quadruple(0.5))
"""


@pytest.mark.parametrize("disk", ["full", "empty"])
def test_a_full_disk_costs_the_next_start_alone(tmp_path: Path, disk: str) -> None:
    (tmp_path / "functions.py").write_text(MODULE)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", RUN, disk], env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.splitlines()[-1] == "12 2.0"
    assert (done.stdout + done.stderr).count("compiled code is not kept") == (disk == "full")
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.stat().st_size]
    assert bool(kept) == (disk == "empty")


def test_code_without_a_folder_is_compiled_at_each_start() -> None:
    made: dict[str, Any] = {}
    exec(compile("def triple(number): return 3 * number", "<nowhere>", "exec"), made)  # of no file: kept nowhere
    assert compiled(made["triple"])(3) == 9


def test_code_that_cannot_be_read_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    (tmp_path / "code.py").write_text("def triple(number): return 3 * number")
    triple = runpy.run_path(str(tmp_path / "code.py"))["triple"]
    assert compiled(triple)(3) == 9
    for index in tmp_path.rglob("*.nbi"):
        index.unlink()
        index.mkdir()  # which root cannot read either
    assert compiled(triple)(3) == 9


@pytest.mark.parametrize("damaged", ["nbi", "nbc"])
@pytest.mark.parametrize("size", [0, 10])
def test_damaged_code_is_compiled_anew_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: str, size: int
) -> None:
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    (tmp_path / "code.py").write_text("def triple(number): return 3 * number")
    code: Any = types.ModuleType("tripling")
    monkeypatch.setitem(sys.modules, "tripling", code)  # where what was kept looks for it
    vars(code).update(runpy.run_path(str(tmp_path / "code.py"), run_name="tripling"))

    def start() -> int:
        """A start of the service: how many signatures it loaded from the disk."""
        triple: Any = compiled(code.triple)
        assert (triple(3), triple(0.5)) == (9, 1.5)
        return sum(triple.stats.cache_hits.values())

    assert [start(), start()] == [0, 2]
    for file in tmp_path.rglob(f"*.{damaged}"):
        os.truncate(file, size)
    start()
    assert start() == 2


def test_damaged_code_that_cannot_be_replaced_is_compiled_at_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    (tmp_path / "code.py").write_text("def triple(number): return 3 * number")
    triple = runpy.run_path(str(tmp_path / "code.py"))["triple"]
    assert compiled(triple)(3) == 9
    for index in tmp_path.rglob("*.nbi"):
        os.truncate(index, 0)
    monkeypatch.setattr(os, "replace", refuse)
    assert compiled(triple)(3) == 9


def test_code_is_compiled_anew_where_that_changed_which_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher: Any = trie_match.draft_tree
    kept = module._Kept(dispatcher.py_func)
    assert kept._cache_file._source_stamp == dispatcher._cache._cache_file._source_stamp
    assert {name for name, *_ in kept._cache_file._source_stamp[1]} >= {"trie_nodes.py", "trie_ranks.py"}
    monkeypatch.setattr(module, "_stamp_of_calls", lambda: ())
    assert module._Kept(dispatcher.py_func)._cache_file._source_stamp != kept._cache_file._source_stamp
