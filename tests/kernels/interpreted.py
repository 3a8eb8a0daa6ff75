"""Tests of Triton kernels run twice: compiled where there is a GPU, and by Triton's interpreter anywhere.

The interpreter is chosen by an environment variable before triton is first imported, for a whole process. So each file
of such tests, all marked `gpu`, has one more that runs the others in a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def kernel_device() -> torch.device:
    """Where kernels run in this process; skips the test where they cannot."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if INTERPRETED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; without one, Triton's interpreter runs this in another process")
    return torch.device("cuda")


def run_under_the_interpreter(path: str) -> None:
    """Runs the tests marked `gpu` of a file by Triton's interpreter; fails with their output."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    command = [sys.executable, "-m", "pytest", path, "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": "", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    if result.returncode:
        pytest.fail(f"under Triton's interpreter:\n{result.stdout[-8000:]}{result.stderr[-2000:]}", pytrace=False)
