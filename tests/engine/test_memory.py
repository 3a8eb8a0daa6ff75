"""How much memory there is, inside control groups too, and what weights take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.memory import Memory, device_memory, host_memory, weight_bytes
from tests.files import with_files

MEMINFO = "MemTotal:       16000000 kB\nMemFree:  1 kB\nMemAvailable:   12000000 kB\nHugePages_Total:       0\n"
KIB = 1024


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    return with_files(root, {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, **files})


def test_without_groups(tmp_path: Path) -> None:
    assert host_memory(machine(tmp_path, "0::/\n", {})) == Memory(12_000_000 * KIB, 16_000_000 * KIB)


def test_a_container_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    files = {"memory.max": "4000000", "memory.current": "1500000", "memory.stat": "anon 3\ninactive_file 500000\n"}
    root = machine(tmp_path, "0::/../host/path\n", {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert host_memory(root) == Memory(3_000_000, 4_000_000)


@pytest.mark.parametrize("outer", [6_000_000, 2_000_000])
def test_the_tightest_group_counts(tmp_path: Path, outer: int) -> None:
    files = {
        "sys/fs/cgroup/a/memory.max": f"{outer}\n", "sys/fs/cgroup/a/memory.current": "1000000\n",
        "sys/fs/cgroup/a/b/memory.max": "4000000\n", "sys/fs/cgroup/a/b/memory.current": "1000000\n",
    }  # fmt: skip
    root = machine(tmp_path, "1:name=systemd:/x\n0::/a/b\n", files)
    smallest = min(outer, 4_000_000)
    assert host_memory(root) == Memory(smallest - 1_000_000, smallest)


def test_version_one_and_no_limit(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/group"
    files = {f"{folder}/memory.limit_in_bytes": "9223372036854771712", f"{folder}/memory.usage_in_bytes": "5"}
    root = machine(tmp_path, "4:memory:/group\n", files)
    assert host_memory(root).total == 16_000_000 * KIB
    (root / folder / "memory.limit_in_bytes").write_text("1000")
    (root / folder / "memory.usage_in_bytes").write_text("2000")
    assert host_memory(root) == Memory(0, 1000)


def test_this_machine() -> None:
    memory = device_memory(torch.device("cpu"))
    assert 0 < memory.free <= memory.total


def test_what_weights_take() -> None:
    shapes = {"model.embed_tokens.weight": (100, 64), "model.layers.0.mlp.down_proj.weight": (64, 128), "norm": (64,)}
    head, layer, rest = 6400, 8192, 6400 + 64
    assert weight_bytes(shapes, 2, None) == 2 * (rest + layer + head)
    assert weight_bytes(shapes, 2, "int8") == 2 * rest + layer + head
    assert weight_bytes(shapes, 2, "int4") == 2 * rest + layer * 5 // 8 + head
    untied = {**shapes, "lm_head.weight": (100, 64)}
    assert weight_bytes(untied, 4, "int8_dynamic") == 4 * rest + layer + head
