"""What does not fit in memory is told in one line, with the flags that ask for it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.errors import StartupError, reason_of


@contextmanager
def memory_for(wanted: str) -> Iterator[None]:
    """StartupError where memory does not suffice, naming the flags of what was wanted, or a GPU for a kernel."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ == "OutOfResources":  # Triton's, which is not imported here: what a GPU has of its own
            raise StartupError(f"a kernel does not fit this GPU: {reason_of(error)}") from error
        if not _is_of_memory(error):
            raise
        raise StartupError(f"no memory for {wanted}: {reason_of(error)}; make them smaller") from error


def _is_of_memory(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):  # torch's allocators', of their own class on devices
        return any(words in str(error) for words in ("allocate memory", "out of memory"))
    return isinstance(error, MemoryError)
