"""Large memory: copies keep their values and outlive the arena."""

from __future__ import annotations

import torch

from kernels.native.memory import ALIGNMENT, CHUNK_BYTES, Arena, huge_zeros


def test_copies_do_not_overlap() -> None:
    arena = Arena()
    shapes = [(3, 5), (1000, 7), (1,), (CHUNK_BYTES // 4 + 3,), (2, 2, 2)]
    originals = [torch.randn(shape).to(dtype) for shape in shapes for dtype in (torch.float32, torch.bfloat16)]
    copies = [arena.place(original) for original in originals]
    del arena
    for copy, original in zip(copies, originals, strict=True):
        assert torch.equal(copy, original)
        assert copy.data_ptr() % ALIGNMENT == 0


def test_zeros_are_zero_and_writable() -> None:
    memory = huge_zeros(5 * 2**20 + 3)
    assert not memory.any()
    memory.fill_(7)
    assert memory.min() == 7


def test_one_chunk_stays_in_the_caches_and_more_does_not() -> None:
    arena = Arena()
    arena.place(torch.zeros(CHUNK_BYTES // 8))
    assert not arena.outgrows_caches
    arena.place(torch.zeros(CHUNK_BYTES // 4))
    assert arena.outgrows_caches
