"""One process per device, as torchrun starts them: `torchrun --nproc-per-node 8 -m outrider train head ...`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import get_node_local_rank
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's number among how many, and its device."""

    rank: int
    num_ranks: int
    device: str

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def wrapped(self, module: nn.Module) -> nn.Module:
        """The module, its gradients averaged over the ranks where there are several."""
        return DistributedDataParallel(module) if self.num_ranks > 1 else module

    def total(self, value: int) -> int:
        """Sum over the ranks."""
        return self._reduced(value, dist.ReduceOp.SUM)

    def least(self, value: int) -> int:
        """The smallest that a rank has."""
        return self._reduced(value, dist.ReduceOp.MIN)

    def any(self, value: bool) -> bool:
        """Whether it holds for one of them."""
        return self.total(int(value)) > 0

    def _reduced(self, value: int, how: dist.ReduceOp.RedOpType) -> int:
        if self.num_ranks == 1:
            return value
        reduced = torch.tensor([value], device=self.device)
        dist.all_reduce(reduced, how)
        return int(reduced)

    def close(self) -> None:
        """Leaves the group."""
        if self.num_ranks > 1:
            dist.destroy_process_group()


def join(device: str) -> Ranks:
    """Joins torchrun's processes when it started this one; each takes the GPU of its local number."""
    if not dist.is_torchelastic_launched():
        return Ranks(0, 1, device)
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    dist.init_process_group("nccl" if on_gpu else "gloo")
    if on_gpu:
        device = f"cuda:{get_node_local_rank()}"
        torch.cuda.set_device(device)
    return Ranks(dist.get_rank(), dist.get_world_size(), device if on_gpu else "cpu")
