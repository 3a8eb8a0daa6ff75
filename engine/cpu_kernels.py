"""The C kernels: whether they are wanted and can be had, asked in one place."""

from __future__ import annotations

import ctypes
from functools import cache

from kernels.native.build import CannotBuild
from kernels.native.library import open_library
from outrider import env
from outrider.telemetry import get_logger

log = get_logger(__name__)


def cpu_kernels() -> ctypes.CDLL | None:
    """The library; None, with a warning that says why, where torch's operators have to do."""
    if not env.cpu_kernel():
        warn_without_kernels("OUTRIDER_CPU_KERNEL is off")
        return None
    try:
        return open_library(env.home() / "kernels")
    except (CannotBuild, OSError) as error:
        warn_without_kernels(str(error))
        return None


@cache
def warn_without_kernels(reason: str) -> None:
    """Says once that something runs without the kernels."""
    log.warning(
        "C kernels not used: slower, and speculation may change an answer where two tokens are about as likely",
        reason=reason,
    )
