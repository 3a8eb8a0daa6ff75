"""How many cores there are: those allowed, or what control groups give of their time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.cores import num_cores
from tests.files import with_files

V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/cpu"
QUOTA, PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("0::/\n", {}, 8),
        ("0::/../host/path\n", {f"{V2}/cpu.max": "150000 100000\n"}, 2),
        ("0::/a\n", {f"{V2}/a/cpu.max": "max 100000\n"}, 8),
        ("0::/a\n", {f"{V2}/a/cpu.max": "5000 100000\n"}, 1),
        ("0::/a\n", {f"{V2}/a/cpu.max": "3200000 100000\n"}, 8),
        ("0::/a/b\n", {f"{V2}/a/cpu.max": "300000 100000\n", f"{V2}/a/b/cpu.max": "500000 100000\n"}, 3),
        ("0::/a/b\n", {f"{V2}/a/cpu.max": "500000 100000\n", f"{V2}/a/b/cpu.max": "300000 100000\n"}, 3),
        ("4:cpu,cpuacct:/g\n", {f"{V1}/g/{QUOTA}": "210000\n", f"{V1}/g/{PERIOD}": "100000\n"}, 3),
        ("4:cpu:/g\n0::/\n", {f"{V1}/g/{QUOTA}": "-1\n", f"{V1}/g/{PERIOD}": "100000\n"}, 8),
        ("4:cpu:/g\n", {f"{V1}/{QUOTA}": "200000\n", f"{V1}/{PERIOD}": "50000\n", f"{V1}/g/{QUOTA}": "-1\n"}, 4),
        ("4:cpuset:/g\n", {f"{V1}/g/{QUOTA}": "100000\n", f"{V1}/g/{PERIOD}": "100000\n"}, 8),
    ],
)  # fmt: skip
def test_a_quota_counts_where_it_is_less(tmp_path: Path, cgroup: str, files: dict[str, str], cores: int) -> None:
    assert num_cores(with_files(tmp_path, {"proc/self/cgroup": cgroup, **files})) == cores


def test_without_groups(tmp_path: Path) -> None:
    assert num_cores(tmp_path) == 8


SCRIPT = """
import os, pathlib
texts = {"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": "20000 100000"}
read = pathlib.Path.read_text
pathlib.Path.read_text = lambda path, **how: texts.get(str(path)) or read(path, **how)
import outrider, torch
print(torch.get_num_threads())
"""


@pytest.mark.parametrize(("said", "threads"), [({}, "1"), ({"OMP_NUM_THREADS": "2"}, "2")])
def test_torch_has_as_many_threads_unless_it_is_told(said: dict[str, str], threads: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | said
    words = [sys.executable, "-c", SCRIPT]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == threads
