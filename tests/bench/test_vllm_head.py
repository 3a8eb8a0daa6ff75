"""`bench vllm_head` runs another Python, which may not be there or not do what it is asked."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench.vllm_head import _vllm
from outrider.errors import StartupError


@pytest.mark.parametrize(
    ("python", "says"),
    [("/nope", "/nope cannot be run: No such file or directory"), ("/bin/false", "vLLM ended with 1; why is above")],
)
def test_a_python_that_fails_is_told_in_a_line(python: str, says: str, tmp_path: Path) -> None:
    args = argparse.Namespace(python=python, head=tmp_path, method="eagle3", tokens=4)
    with pytest.raises(StartupError, match=f"^{says}$"):
        _vllm(args, tmp_path, [])
