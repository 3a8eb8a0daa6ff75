"""What tests of kernels run on."""

from __future__ import annotations

import ctypes

import pytest
import torch

from kernels.native.build import CannotBuild
from kernels.native.library import open_library
from outrider import env
from tests.kernels.interpreted import kernel_device


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    """The C kernels; skips the test where they cannot be built."""
    try:
        return open_library(env.home() / "kernels")
    except CannotBuild as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """See kernel_device."""
    return kernel_device()
