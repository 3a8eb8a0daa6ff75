"""Signals to long work."""

from __future__ import annotations

import signal

import pytest

from training.stopping import Stopping


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_asks_for_an_end_and_the_second_ends(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    signal.signal(signal.SIGHUP, lambda *_: None)  # not ignored, as it is under nohup
    stopping = Stopping("finishing")
    signal.raise_signal(number)
    assert (stopping.asked, capsys.readouterr().err) == (True, "finishing\n")
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)
