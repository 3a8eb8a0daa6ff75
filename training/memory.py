"""What does not fit in memory is told in one line, with the flags that ask for it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from outrider.errors import StartupError


@contextmanager
def memory_for(wanted: str) -> Iterator[None]:
    """StartupError, naming what was wanted, where memory does not suffice for it."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not _is_of_memory(error):
            raise
        raise StartupError(f"there is not enough memory for {wanted}; make them smaller") from error


def _is_of_memory(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # torch's own class is of devices; its CPU allocator raises a plain RuntimeError.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)
