"""Ending long work well: what is under way is finished, and kept."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from outrider.stopping import stop_signals


class Stopping:
    """Whether a signal asked for an end; a second one ends at once. Says `notice` at the first."""

    def __init__(self, notice: str = "") -> None:
        self.asked = False
        self._notice = notice
        for number in stop_signals():
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if self._notice:
            print(self._notice, file=sys.stderr, flush=True)
