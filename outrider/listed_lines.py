"""Files that people write a thing a line in; blank lines, and those that begin with #, are left out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from outrider.errors import StartupError
from outrider.file_stamp import check_regular, file_stamp
from outrider.telemetry import Throttle, get_logger

log = get_logger(__name__)

EntryT = TypeVar("EntryT")


def lines_of(text: str) -> list[tuple[int, str]]:
    """The lines, without space around them, and their numbers from 1."""
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    return [(number, line) for number, line in lines if line and not line.startswith("#")]


class WatchedFile(ABC, Generic[EntryT]):
    """What a flag's file lists, as it stands now; `listed` is the word for it.

    StartupError when it cannot be used at first; when it cannot later, what it listed before stays.
    """

    listed: ClassVar[str]

    def __init__(self, path: str, flag: str) -> None:
        self._path = Path(path)
        self._flag = flag
        self._stamp: tuple[int, ...] | None = None
        self._throttle = Throttle()
        self.entries = self._read()

    def refresh(self) -> bool:
        """Reads the file again if it has changed; whether there are other entries now."""
        try:
            if self._stamp_now() == self._stamp:
                return False
            self.entries = self._read()
        except StartupError as error:
            if self._throttle.allows():
                log.warning(
                    f"the file of {self.listed} cannot be read; the {self.listed} before stay", reason=error.message
                )
            return False
        log.info(f"{self.listed} read again", path=str(self._path), **{self.listed: len(self.entries)})
        return True

    @abstractmethod
    def _parsed(self, lines: list[tuple[int, str]]) -> list[EntryT]:
        """What the numbered lines list. StartupError where they are wrong."""

    def _read(self) -> list[EntryT]:
        stamp = self._stamp_now()
        try:
            check_regular(self._path)
            text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StartupError(f"cannot read {self._flag}: {error}") from error
        self._stamp = stamp  # not before: what may not be read now has the same stamp when it may
        return self._parsed(lines_of(text))

    def _stamp_now(self) -> tuple[int, ...]:
        try:
            return file_stamp(self._path)
        except OSError as error:
            raise StartupError(f"cannot read {self._flag}: {error}") from error
