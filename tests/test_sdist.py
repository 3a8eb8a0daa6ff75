"""What a source distribution has: all that the packages are built from, and no part of the tests, which need more."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIST = "from setuptools import setup; setup(script_args=['-q', 'egg_info'])"


@pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="no setuptools")
def test_a_source_distribution_has_the_packages_and_no_half_of_the_tests(tmp_path: Path) -> None:
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.suffix != ".egg-info":
            (tmp_path / path.name).symlink_to(path)
    subprocess.run([sys.executable, "-P", "-c", LIST], cwd=tmp_path, check=True)
    sources = (tmp_path / "outrider.egg-info" / "SOURCES.txt").read_text().splitlines()
    listed = {os.path.normpath(name) for name in sources}
    assert {"LICENSE", "README.md", "pyproject.toml", "kernels/native/simd.h", "gateway/page/main.js"} <= listed
    assert not [name for name in listed if name.startswith("tests/")]
