"""Large memory: for weights, which are read from end to end at every step, and pools, which are read all over."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

CHUNK_BYTES = 32 * 2**20
HUGE_PAGE = 2 * 2**20
ALIGNMENT = 128


class Arena:
    """Hands out tensors from large mappings in huge pages, where the system has them.

    A step streams all weights through the cores; with pages of 4 KiB, walking the page tables costs 5 to 10 % of it.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._placed = 0  # bytes, in all chunks

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy that lies in the arena, for as long as the copy lives."""
        size = tensor.numel() * tensor.element_size()
        if self._used + size > len(self._chunk):
            self._chunk, self._used = huge_zeros(max(size, CHUNK_BYTES)), 0
        self._placed += size
        memory = self._chunk[self._used : self._used + size]
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        placed = memory.view(tensor.dtype).view(tensor.shape)
        placed.copy_(tensor)
        return placed

    @property
    def outgrows_caches(self) -> bool:
        """Whether reading all that was placed drives everything else out of the caches."""
        return self._placed > CHUNK_BYTES


def huge_zeros(num_bytes: int) -> torch.Tensor:
    """Zeros (uint8), in huge pages where the system has them; a page takes memory when it is first written.

    MemoryError where the system gives none.
    """
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes >> 20} MiB at once: {error.strerror}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel built without huge pages refuses; ordinary ones serve.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
