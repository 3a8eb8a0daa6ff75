"""Where models run: the device that a flag names, and the threads that work on it.

A CUDA thread has a current device, the first by default, where kernels and graphs of its own go whatever device their
tensors are on. So each thread that runs steps takes its device first.
"""

from __future__ import annotations

import threading
from types import TracebackType

import torch

from outrider.errors import StartupError


def pick_device(name: str) -> torch.device:
    """auto: the first CUDA device where there is one. Raises StartupError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise StartupError(f"device {name!r} is unknown: {error}") from error
    if device.type not in {"cpu", "cuda"}:
        raise StartupError(f"device {name!r} is not supported; cpu and cuda are")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise StartupError(f"device {name!r} is not there; CUDA devices found: {torch.cuda.device_count()}")
    return device


def take_device(device: torch.device) -> None:
    """Has this thread work on `device` from now on. On a CPU nothing changes."""
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)


class DeviceLock:
    """A model's lock: one thread at a time has it, and works on the model's device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()

    def locked(self) -> bool:
        """Whether a thread has it."""
        return self._lock.locked()

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            take_device(self._device)
        except BaseException:
            self._lock.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
