"""Threads and the device that they work on."""

from __future__ import annotations

import threading

import pytest
import torch

from engine.devices import DeviceLock, take_device


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Devices that were taken, and by which thread."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: found.append((index, threading.get_ident())))
    return found


def test_a_thread_takes_the_device_of_its_model(taken: list[tuple[int, int]]) -> None:
    me = threading.get_ident()
    for name in ("cpu", "cuda", "cuda:1"):
        take_device(torch.device(name))
    assert taken == [(0, me), (1, me)]


def test_whoever_has_the_lock_works_on_its_device(taken: list[tuple[int, int]]) -> None:
    lock = DeviceLock(torch.device("cuda:1"))

    def work() -> None:
        with lock:
            assert lock.locked()

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert [index for index, _ in taken] == [1, 1]
    assert not lock.locked()


def test_a_device_that_cannot_be_taken_leaves_the_lock_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(index: int) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch.cuda, "set_device", fail)
    lock = DeviceLock(torch.device("cuda:7"))
    with pytest.raises(RuntimeError, match="no such device"), lock:
        pass
    assert not lock.locked()
