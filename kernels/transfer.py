"""From numpy to a device without waiting for it."""

from __future__ import annotations

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """`array` as a tensor on `device`: on CPU the same memory, elsewhere a copy that the host does not wait for.

    It goes by pinned memory that torch keeps until the copy is done, so `array` may be written again at once.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
