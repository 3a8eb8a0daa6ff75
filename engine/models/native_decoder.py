"""A decoder of the C kernels, and what it points into."""

from __future__ import annotations

import ctypes
import weakref

import torch

from kernels.native.library import CModel, address
from kernels.native.memory import Arena
from kernels.native.streaming import choose_streaming


class NativeDecoder:
    """Keeps what C points into for as long as C may look: `alive`, and what goes through `_keep` and `_floats`."""

    def __init__(self, library: ctypes.CDLL, *alive: object) -> None:
        self.library = library
        self.decoder = 0
        self._alive = list(alive)

    def _create(self, model: CModel, num_threads: int, weights: Arena) -> None:
        """Makes `decoder`, once all that `model` points to is kept. MemoryError."""
        if weights.outgrows_caches:
            choose_streaming(model, self.library, num_threads)
        self.decoder = self.library.outrider_decoder_create(ctypes.byref(model), num_threads)
        if not self.decoder:
            raise MemoryError("no memory for the decoder")
        self._alive.append(model)
        weakref.finalize(self, _destroy, self.library, self.decoder, self._alive)

    def _floats(self, tensor: torch.Tensor | None) -> int | None:
        """Address of its numbers in fp32."""
        return None if tensor is None else self._keep(tensor.float().contiguous())

    def _keep(self, tensor: torch.Tensor) -> int | None:
        """Keeps a tensor alive; the address of its numbers."""
        self._alive.append(tensor)
        return address(tensor)


def _destroy(library: ctypes.CDLL, decoder: int, _alive: list[object]) -> None:
    """Destroys a decoder; what it points into is kept until now."""
    library.outrider_decoder_destroy(decoder)
