"""What an extra of pyproject.toml installs is all that its commands import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.image import hiding_all_but

ROOT = Path(__file__).parents[1]
IMPORT = """
import importlib
import sys

for name in sys.argv[1:]:
    importlib.import_module(name)
"""


@pytest.mark.parametrize(("extra", "package"), [("train", "training"), ("bench", "bench")])
def test_an_extra_has_what_its_package_imports(extra: str, package: str) -> None:
    paths = sorted((ROOT / package).rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths if path.stem != "__main__"]
    done = subprocess.run(
        [sys.executable, "-c", hiding_all_but(extra) + IMPORT, *names],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
