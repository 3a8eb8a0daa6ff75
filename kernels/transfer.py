"""From numpy to a device without waiting for it, and back in one go."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """`array` as a tensor on `device`: on CPU the same memory, elsewhere a copy that the host does not wait for.

    It goes by pinned memory that torch keeps until the copy is done, so `array` may be written again at once.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def send(array: np.ndarray, place: torch.Tensor) -> None:
    """Copies `array` to where it belongs, in the order of the device's work; it may be written again at once."""
    tensor = torch.from_numpy(array)
    place.copy_(tensor if place.device.type == "cpu" else tensor.pin_memory(), non_blocking=True)


class Readback:
    """Tensors of float64 and int64 that come to the host together, with one wait for the device."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> int:
        """Adds a tensor; its place in what `fetch` returns."""
        self._parts.append(tensor)
        return len(self._parts) - 1

    def add_all(self, tensors: Iterable[torch.Tensor]) -> int:
        """Adds tensors; the first one's place in what `fetch` returns."""
        start = len(self._parts)
        self._parts.extend(tensors)
        return start

    def fetch(self) -> list[npt.NDArray[np.generic]]:
        """All of them, in numpy."""
        if not self._parts:
            return []
        flat = torch.cat([part.contiguous().view(torch.int64).flatten() for part in self._parts]).cpu().numpy()
        ends = np.cumsum([part.numel() for part in self._parts])
        kinds = [np.float64 if part.dtype is torch.float64 else np.int64 for part in self._parts]
        return [
            piece.view(kind).reshape(part.shape)
            for piece, kind, part in zip(np.split(flat, ends[:-1]), kinds, self._parts, strict=True)
        ]
