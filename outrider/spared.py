"""Blocks that may fail for nobody's loss: what only accounts, and no answer depends on."""

from __future__ import annotations

from types import TracebackType
from typing import Any


class Spared:
    """`with` it, what is raised in a block ends there, at the cost of speed; the first such error is logged.

    log: of structlog. event: what to say of it.
    """

    def __init__(self, log: Any, event: str) -> None:
        self._log = log
        self._event = event
        self._is_said = False

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if not self._is_said:
            self._log.error(self._event, exc_info=error)
        self._is_said = True
        return True
