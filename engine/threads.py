"""CPU threads: the C kernels have a team of their own, and torch then keeps to one.

torch shares its operators' work out by OpenMP, whose barriers stand still while another process has one of the cores:
a softmax of 0.1 ms was seen to take 70 ms beside busy neighbours. The operators left to torch are small.
"""

from __future__ import annotations

import torch

_BY_DEFAULT = torch.get_num_threads()


def kernel_threads(asked: int | None) -> int:
    """Threads for a team: as asked, else as many as torch takes by default (OMP_NUM_THREADS, or the cores)."""
    return asked or _BY_DEFAULT


def leave_cores_to_kernels() -> None:
    """Has torch use one thread from now on, in this process."""
    torch.set_num_threads(1)
