"""How much memory is allocated, which a copy of what was copied before shows in."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterable


def bytes_per_step(steps: Iterable[Callable[[], object]]) -> float:
    """The bytes that a step allocates, what it frees again included, on average over all steps."""
    sizes: list[int] = []
    tracemalloc.start()
    try:
        for step in steps:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            step()
            sizes.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    return sum(sizes) / len(sizes)
