"""Whether a model larger than the caches is read past them, as it is measured on this machine when it is loaded.

linear.h has both ways. Past the caches what lies there stays, and on some CPUs a step is a tenth faster so; on others,
which do not keep such lines out of their outer caches, 8 rows take a tenth longer.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from kernels.native.library import CMatrix, CModel
from kernels.native_linear import ProductTeam

_ROWS = 8  # about what a step has that verifies a tree; with fewer both ways are as fast as memory is
_TURNS = 5
_MOST_NUMBERS = 256 * 2**20  # of a larger model that many are read: some tenths of a second


def choose_streaming(
    model: CModel, library: ctypes.CDLL, num_threads: int, clock: Callable[[], float] = time.perf_counter
) -> None:
    """Sets `streams` of a decoder's matrices; before it is created. MemoryError."""
    layers = [model.layers[index] for index in range(model.num_layers)]
    own = [matrix for layer in layers for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    matrices = [matrix for matrix in (*own, model.head, *model.join, model.fuse) if matrix.n]
    times: dict[bool, list[float]] = {False: [], True: []}
    products = _Products(ProductTeam(library, num_threads), matrices, wide=bool(model.wide_activations))
    for turn in range(1 + _TURNS):
        for streams, taken in times.items():
            _set(matrices, streams)
            began = clock()
            products.run()
            if turn:  # the first one pages memory in
                taken.append(clock() - began)
    _set(matrices, statistics.median(times[True]) < statistics.median(times[False]))


def _set(matrices: Sequence[CMatrix], streams: bool) -> None:
    for matrix in matrices:
        matrix.streams = streams


class _Products:
    """_ROWS rows of zeros through each matrix, as far as _MOST_NUMBERS go."""

    def __init__(self, team: ProductTeam, matrices: Sequence[CMatrix], *, wide: bool) -> None:
        self._team = team
        self._matrices: list[CMatrix] = []
        numbers = 0
        for matrix in matrices:
            if numbers < _MOST_NUMBERS:
                self._matrices.append(matrix)
                numbers += matrix.n * matrix.k
        self._wide = wide
        self._x = torch.zeros(_ROWS, max(matrix.k for matrix in self._matrices))
        self._y = torch.empty(_ROWS, max(matrix.n for matrix in self._matrices))

    def run(self) -> None:
        """Each once."""
        for matrix in self._matrices:
            self._team.multiply(matrix, self._x, self._y, wide=self._wide, narrow=not self._wide)
