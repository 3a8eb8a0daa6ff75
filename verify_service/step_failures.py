"""What a failed step means: for its sessions, and for the engine."""

from __future__ import annotations

import torch

# After so many steps in a row that failed for every one of their sessions it is the engine that is at fault.
MAX_FAILED_STEPS = 3


def ends_the_engine(error: Exception) -> bool:
    """Whether nothing can be computed any more: a device's errors stay, but for want of memory."""
    return isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError)
