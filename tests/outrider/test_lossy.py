"""Output that nobody reads: it is lost and counted, and who writes it does not wait."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from outrider.lossy import Lossy
from tests.engine.disk import full_disk

Read = Callable[[], bytes]
Ends = tuple[Lossy, Read]


@pytest.fixture(params=["pipe", "socket"])
def ends(request: pytest.FixtureRequest) -> Generator[Ends]:
    """A stream, and what reads all that is there."""
    if request.param == "pipe":
        ours, theirs = os.pipe()
    else:
        ours, theirs = (end.detach() for end in socket.socketpair())
    with open(theirs, "w") as stream, open(ours, "rb", buffering=0) as reader:
        os.set_blocking(ours, False)
        lossy = Lossy(stream)
        lossy.service = "verify"
        yield lossy, lambda: b"".join(iter(lambda: reader.read(1 << 20) or b"", b""))
        assert os.get_blocking(theirs)  # it is also others'


def number_lost(text: bytes) -> int:
    """What the lines that tell of losses add up to."""
    return sum(json.loads(line)["num_lines"] for line in re.findall(rb"^\{.*$", text, re.MULTILINE))


@pytest.mark.parametrize("length", [20, 4096, 10_000])
def test_what_there_is_no_room_for_is_lost_and_counted(ends: Ends, length: int) -> None:
    lossy, read = ends
    number = 600_000 // length
    for _ in range(number):
        lossy.write("x" * (length - 1) + "\n")
    text = read()
    for _ in range(3):
        lossy.write("Y" * (length - 1) + "\n")
    text += read()
    whole = re.findall(rb"^(?:x+|Y+)$", text, re.MULTILINE)
    assert sum(len(line) == length - 1 for line in whole) + number_lost(text) == number + 3
    assert re.search(rb"^\{.*\}\nY", text, re.MULTILINE)
    assert text.count(b"Y") == 3 * (length - 1)


def test_a_line_in_pieces_is_lost_as_one(ends: Ends) -> None:
    lossy, read = ends
    lossy.write_bytes(b"one\ntw")
    lossy.write_bytes(b"o\n")
    assert read() == b"one\ntwo\n"
    lossy.write_bytes(b"a part")
    lossy.write_bytes((b"z" * 99 + b"\n") * 4_000)
    lossy.write_bytes(b"of what is")
    before = read()
    lossy.write_bytes(b" lost\nlast\n")
    text = before + read()
    assert text.startswith(b"a partzzz")
    assert b"lost\n" not in text
    assert text.endswith(b"}\nlast\n")
    assert text.count(b"z\n") + number_lost(text) == 4_001


def test_files_get_everything(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        lossy = Lossy(stream)
        lossy.write("one\n")
        lossy.flush()
        lossy.write_bytes(b"two\n" * 100_000)
    assert (tmp_path / "log").read_text() == "one\n" + "two\n" * 100_000


def test_a_full_disk_takes_whole_lines_once_it_has_room_again(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        lossy = Lossy(stream)
        lossy.service = "verify"
        with full_disk(1000):
            for _ in range(50):
                lossy.write("x" * 29 + "\n")
        lossy.write("there is room\n")
    text = (tmp_path / "log").read_bytes()
    *_, broken_off, news, last = text.split(b"\n")[:-1]
    assert text.startswith((b"x" * 29 + b"\n") * 33 + broken_off + b"\n")
    assert json.loads(news)["num_lines"] == 50 - 33
    assert (broken_off, last) == (b"x" * 10, b"there is room")


SAYS = """
import logging
from outrider.child_output import to_stderr
from outrider.telemetry import announce, configure_logging, get_logger
configure_logging("verify")
for number in range(3000):
    get_logger("a").warning("ours", number=number)
    logging.getLogger("some.library").warning("a library's")
    announce("for the person")
    to_stderr(b"a part's\\n")
"""


def test_no_way_of_speaking_waits_for_a_reader() -> None:
    read_end, write_end = os.pipe()
    try:
        ended = subprocess.run([sys.executable, "-c", SAYS], stdout=write_end, stderr=write_end, timeout=100)
        assert ended.returncode == 0
    finally:
        os.close(write_end)
        os.close(read_end)
