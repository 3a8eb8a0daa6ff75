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
from numba.core.caching import IndexDataCacheFile

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


class Service:
    """A function in a file, which each start compiles, or loads from the folder `cache`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file, self.cache = folder / "code.py", folder / "cache"
        self._code: Any = types.ModuleType("multiplying")
        monkeypatch.setattr(config, "CACHE_DIR", str(self.cache))
        monkeypatch.setitem(sys.modules, "multiplying", self._code)  # where what was kept looks for it

    def write(self, factor: int) -> None:
        self.file.write_text(f"def multiply(number): return {factor} * number")

    def start(self, factor: int = 3) -> int:
        """How many signatures it loaded from the disk."""
        vars(self._code).update(runpy.run_path(str(self.file), run_name="multiplying"))
        multiply: Any = compiled(self._code.multiply)
        assert (multiply(3), multiply(0.5)) == (3 * factor, 0.5 * factor)
        return sum(multiply.stats.cache_hits.values())

    def kept(self, ending: str) -> list[Path]:
        return sorted(self.cache.rglob(f"*.{ending}"))


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    made = Service(tmp_path, monkeypatch)
    made.write(3)
    return made


@pytest.mark.parametrize("damaged", ["nbi", "nbc"])
@pytest.mark.parametrize("size", [0, 10])
def test_damaged_code_is_compiled_anew_and_kept(service: Service, damaged: str, size: int) -> None:
    assert [service.start(), service.start()] == [0, 2]
    for file in service.kept(damaged):
        os.truncate(file, size)
    service.start()
    assert service.start() == 2


@pytest.mark.parametrize("part", ["header", "middle", "end"])
def test_code_of_which_a_part_is_lost_is_never_loaded(service: Service, part: str) -> None:
    """Such an object ends the process that loads it."""
    service.start()
    for file in service.kept("nbc"):
        whole = file.read_bytes()
        header = whole.index(b"\x7fELF")
        lost = {"header": header, "middle": (header + len(whole)) // 2, "end": len(whole) - 512}[part]
        file.write_bytes(whole[:lost] + bytes(512) + whole[lost + 512 :])
    assert service.start() == 0
    assert service.start() == 2


def test_an_older_file_s_code_under_a_newer_list_is_not_loaded(service: Service) -> None:
    """A power cut leaves it so, and until it has written the code another process."""
    service.start()
    older = {file: file.read_bytes() for file in service.kept("nbc")}
    service.write(-5)
    assert service.start(-5) == 0
    for file, kept in older.items():
        file.write_bytes(kept)
    assert service.start(-5) == 0
    assert service.start(-5) == 2


def test_code_that_was_kept_without_digests_is_compiled_anew_without_a_word(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as before:
        before.setattr(module, "_Digested", IndexDataCacheFile)
        before.setattr(module, "_stamp_of_calls", lambda: ())
        assert [service.start(), service.start()] == [0, 2]
    capsys.readouterr()
    module._tell_damage.cache_clear()
    assert [service.start(), service.start()] == [0, 2]
    assert "damaged" not in "".join(capsys.readouterr())


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
    assert {name for name, *_ in kept._cache_file._source_stamp[1]} >= {
        "compiled.py", "trie_nodes.py", "trie_ranks.py"
    }  # fmt: skip
    monkeypatch.setattr(module, "_stamp_of_calls", lambda: ())
    assert module._Kept(dispatcher.py_func)._cache_file._source_stamp != kept._cache_file._source_stamp
