"""Progress of something slow: a bar on a terminal, a plain line at the start and the end elsewhere; all on stderr."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from tqdm import tqdm


class Progress:
    """`with Progress("Converting") as progress: progress.at(done, total)`. Counts are in `unit`s."""

    def __init__(self, title: str, unit: str = "it") -> None:
        self.title = title
        self._bar: tqdm | None = None
        if sys.stderr.isatty():
            self._bar = tqdm(desc=title, unit=unit, unit_scale=True, file=sys.stderr, leave=True)
        else:
            print(f"{title} ...", file=sys.stderr, flush=True)

    def at(self, done: int, total: int) -> None:
        """`done` of `total` are behind us."""
        if self._bar is not None:
            self._bar.total = total
            self._bar.update(done - self._bar.n)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
        elif kind is None:
            print(f"{self.title}: done", file=sys.stderr, flush=True)
