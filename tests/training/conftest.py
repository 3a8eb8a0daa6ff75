"""One tiny target and its data for all tests of training."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.training import rig


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rig.make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with _handlers_kept():
        return rig.make_data(tmp_path_factory.mktemp("data"), target)


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Signal handlers as they were: who trains hears them to the end of its process."""
    with _handlers_kept():
        yield


@contextmanager
def _handlers_kept() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
