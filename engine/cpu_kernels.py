"""The C kernels: whether they are wanted and can be had, asked in one place."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from kernels.native.build import CannotBuild
from kernels.native.library import open_library
from outrider import env
from outrider.cores import num_cores
from outrider.stopping import tidied_when_stopped
from outrider.telemetry import get_logger

log = get_logger(__name__)


def cpu_kernels() -> ctypes.CDLL | None:
    """The library; None, with a warning that says why, where torch's operators have to do."""
    found = _library_or_reason(env.home() / "kernels") if env.cpu_kernel() else "OUTRIDER_CPU_KERNEL is off"
    if isinstance(found, str):
        warn_without_kernels(found)
        return None
    return found


@cache
def _library_or_reason(folder: Path) -> ctypes.CDLL | str:
    """The library, or why it cannot be had, which takes up to minutes to find out."""
    try:
        with tidied_when_stopped():
            return open_library(folder, num_cores())
    except (CannotBuild, OSError) as error:
        return str(error)


@cache
def warn_without_kernels(reason: str) -> None:
    """Says once that something runs without the kernels."""
    log.warning(
        "C kernels not used: slower, and speculation may change an answer where two tokens are about as likely",
        reason=reason,
    )
