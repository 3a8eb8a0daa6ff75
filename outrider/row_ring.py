"""Rows in memory that two processes on one host share: written by one, read by the other, never sent.

A file of /dev/shm: a header that begins with a nonce, then slots of one row each. Rows have sequence numbers; number s
lies in slot s mod num_slots. Rows that belong together lie one behind another, never over the ring's end, where numbers
are skipped. While the file has a name its writer holds a lock on it, so that what a killed one left is known for such.
Knows nothing of what a row means, or of how its number gets across.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.v1 import common_pb2

HEADER_BYTES = 4096
_NONCE_BYTES = 16
_FOLDER = Path("/dev/shm")
_PREFIX = "outrider-"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Rows = NDArray[np.uint8]


def host_id() -> str:
    """Equal for processes that may share memory: the host's name and the kernel's start."""
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()}/{boot_id}"


def remove_left_behind() -> int:
    """Removes the files of writers that are gone; how many they were. Those of other users stay."""
    removed = 0
    for path in _FOLDER.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # gone meanwhile, another user's, or locked
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed += 1
            finally:
                os.close(file)
    return removed


class RowRing:
    """The writer's side. OSError where the memory cannot be had.

    Used by one thread, but for `prove` and `unlink`, which any may call.
    """

    def __init__(self, slot_bytes: int, num_slots: int) -> None:
        self.name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.proven = False  # the reader sees it
        self.was_full = False  # since somebody last set it to False
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._head = self._tail = 0  # next number to be written; first that is not read
        self._file: int | None = os.open(_FOLDER, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            size = HEADER_BYTES + num_slots * slot_bytes
            os.posix_fallocate(self._file, 0, size)  # a page that is not there when it is written ends the process
            memory = mmap.mmap(self._file, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
            # The name comes last: nothing is ever seen unlocked. Only with src_dir_fd does Python follow the link.
            link, name = f"/proc/self/fd/{self._file}", _FOLDER / self.name
            os.link(link, name, src_dir_fd=self._file, follow_symlinks=True)
        except OSError:
            self.unlink()
            raise
        memory[:_NONCE_BYTES] = self._nonce
        self._slots: Rows = np.frombuffer(memory, np.uint8, offset=HEADER_BYTES).reshape(num_slots, slot_bytes)

    @property
    def end(self) -> int:
        """One past the number of the last row that was written."""
        return self._head

    def prove(self, nonce: bytes) -> bool:
        """The reader has sent what it found in the header; returns whether that is right. If so, rows may be written.

        The file goes then: both have the memory.
        """
        is_right = secrets.compare_digest(nonce, self._nonce)
        if is_right:
            self.proven = True
            self.unlink()
        return is_right

    def unlink(self) -> None:
        """Removes the name; the memory goes when neither side has it any more."""
        (_FOLDER / self.name).unlink(missing_ok=True)
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def put(self, count: int, fill: Callable[[Rows], object]) -> int | None:
        """Has `fill` write rows uint8 [count, slot_bytes]; the first one's number, or None where there is no room."""
        first = self._head
        place = first % self.num_slots
        if place + count > self.num_slots:
            first, place = first + self.num_slots - place, 0
        tail = first if self._tail == self._head else self._tail  # what is skipped holds nothing up when all is read
        if not self.proven or first + count - tail > self.num_slots:
            self.was_full = self.proven
            return None
        fill(self._slots[place : place + count])
        self._head, self._tail = first + count, tail
        return first

    def read(self, last: int) -> bool:
        """Notes that the rows up to number `last` have been read; False where that one was not written yet."""
        if self._tail <= last < self._head:
            self._tail = last + 1
        return last < self._head


class RowReader:
    """The reader's side of a ring of this name and these sizes. OSError or ValueError where it cannot be seen.

    dtype: the wire's, of the numbers in a row. `last`: number of the last row that was read, None before the first.
    """

    def __init__(
        self, name: str, *, num_slots: int, slot_bytes: int, header_bytes: int, dtype: common_pb2.Dtype
    ) -> None:
        if not name.startswith(_PREFIX) or "/" in name or not num_slots or not slot_bytes:
            raise ValueError(f"no ring is called {name!r}, with {num_slots} slots of {slot_bytes} bytes")
        file = os.open(_FOLDER / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = header_bytes + num_slots * slot_bytes
            memory = mmap.mmap(file, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
        finally:
            os.close(file)
        self.nonce = memory[:_NONCE_BYTES]
        self.dtype = dtype
        self.last: int | None = None
        self.slot_bytes, self._num_slots = slot_bytes, num_slots
        self._slots: Rows = np.frombuffer(memory, np.uint8, offset=header_bytes).reshape(num_slots, slot_bytes)
        self._address: int = self._slots.ctypes.data

    def rows(self, first: int, count: int) -> Rows:
        """The rows from number `first` on, uint8 [count, slot_bytes], to be copied before the writer is told of `last`.

        ValueError for rows over the ring's end.
        """
        place = self._read(first, count)
        return self._slots[place : place + count]

    def skip(self, end: int) -> None:
        """Notes that all rows before number `end` have been read, or will never be asked for."""
        self.last = max(end - 1, -1 if self.last is None else self.last)

    def address(self, first: int, count: int) -> int:
        """Where `rows` lie."""
        return self._address + self._read(first, count) * self.slot_bytes

    def _read(self, first: int, count: int) -> int:
        place = first % self._num_slots
        if not 0 < count <= self._num_slots - place:
            raise ValueError(f"{count} rows from slot {place} of {self._num_slots} on")
        self.last = max(first + count - 1, -1 if self.last is None else self.last)
        return place
