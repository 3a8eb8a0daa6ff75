"""CPU threads: the C kernels have a team of their own, and torch then keeps to one.

torch shares its operators' work out by OpenMP, whose barriers stand still while another process has one of the cores:
a softmax of 0.1 ms was seen to take 70 ms beside busy neighbours. The operators left to torch are small.
"""

from __future__ import annotations

import torch

_BY_DEFAULT = torch.get_num_threads()


def share_cores(asked: int | None, *, by_kernels: bool) -> int:
    """Threads for the kernels' team: as asked, else as many as torch takes by default (OMP_NUM_THREADS, or the cores).

    A control group's limit is in OMP_NUM_THREADS, unless that was set before (outrider/__init__.py).
    From now on torch has one thread in this process; without kernels, all of them.
    """
    count = asked or _BY_DEFAULT
    torch.set_num_threads(1 if by_kernels else count)
    return count
