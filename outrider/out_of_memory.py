"""What does not fit in memory is told in one line, with the flags that ask for it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.errors import StartupError, reason_of


@contextmanager
def memory_for(wanted: str) -> Iterator[None]:
    """StartupError, naming the flags of what was wanted, where memory does not suffice for it."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not _is_of_memory(error):
            raise
        raise StartupError(f"no memory for {wanted}: {reason_of(error)}; make them smaller") from error


def _is_of_memory(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # torch's allocators raise RuntimeErrors, of their own class on devices.
    return isinstance(error, MemoryError) or any(words in str(error) for words in ("allocate memory", "out of memory"))
