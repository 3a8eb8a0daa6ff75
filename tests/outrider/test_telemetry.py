"""What is said to the person at the terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SAYS = "from outrider.telemetry import announce; announce('one'); announce('two'); import os; os.write(2, b'alive')"


def test_a_service_outlives_who_read_its_first_line() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    ended = subprocess.run([sys.executable, "-c", SAYS], stdout=write_end, stderr=subprocess.PIPE, check=False)
    os.close(write_end)
    assert (ended.returncode, ended.stderr) == (0, b"alive")


def test_nobody_need_listen() -> None:
    command = ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, SAYS]
    ended = subprocess.run(command, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"alive")


FULL = """
from outrider.telemetry import announce, configure_logging, get_logger
configure_logging("verify")
announce("one")
get_logger("a").warning("lost")
get_logger("a").warning("lost too")
open(WELL, "w").close()
"""


def test_a_full_disk_ends_no_service(tmp_path: Path) -> None:
    well = tmp_path / "well"
    with open("/dev/full", "w") as full:
        code = FULL.replace("WELL", repr(str(well)))
        subprocess.run([sys.executable, "-c", code], stdout=full, stderr=full, check=False)
    assert well.exists()


LOGS = """
import threading
import structlog
from outrider.telemetry import configure_logging, get_logger

configure_logging("verify")
names = ("verify_service.step_loop", "draft_service.link", "gateway.app", "engine.loader")
threading.Thread(target=lambda: [get_logger(name).warning("in a thread") for name in names]).start()
structlog.contextvars.bind_contextvars(service="draft")
for name in names:
    get_logger(name).warning("in a context")
"""


def test_a_line_names_its_service_on_any_thread_and_in_any_context() -> None:
    """Verify and draft in one process: the drafter's own task calls verify, and what they share is whose task it is."""
    ended = subprocess.run([sys.executable, "-c", LOGS], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    services = {
        where: [line["service"] for line in lines if line["event"] == where]
        for where in ("in a thread", "in a context")
    }
    assert services["in a thread"] == ["verify", "draft", "gateway", "verify"]
    assert services["in a context"] == ["verify", "draft", "gateway", "draft"]


TERMINAL = """
import logging
import sys
sys.stderr.isatty = lambda: True
from outrider.telemetry import configure_logging, get_logger
configure_logging("verify")
sent = "\\x1b]0;title\\x07\\x9b31m\\x7f"
get_logger("a").warning("http", path="/" + sent)
get_logger("a").warning(sent)
try:
    raise ValueError(sent)
except ValueError:
    get_logger("a").exception("failed")
logging.getLogger("some.library").warning("peer %s", sent)
"""


def test_a_terminal_is_shown_what_it_would_obey() -> None:
    ended = subprocess.run([sys.executable, "-c", TERMINAL], capture_output=True, text=True, check=True)
    assert ended.stderr.count("\\x1b]0;title\\x07\\x9b31m\\x7f") == 4
    assert not any(control in ended.stderr for control in ("\x1b]", "\x07", "\x9b", "\x7f"))
    assert "Traceback (most recent call last):\n" in ended.stderr


LIBRARY = """
import logging
from outrider.telemetry import configure_logging
configure_logging("verify")
logging.getLogger("some.library").warning("it said %d", 5)
"""


def test_what_a_library_logs_is_json_too() -> None:
    ended = subprocess.run([sys.executable, "-c", LIBRARY], capture_output=True, text=True, check=True)
    line = json.loads(ended.stderr)
    found = line["event"], line["service"], line["module"], line["level"]
    assert found == ("it said 5", "verify", "some.library", "warning")
