"""Real processes for tests: `outrider serve` or a part of it, started as a user would, awaited by their output."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai

_START_TIMEOUT_S = 240.0


class Process:
    """A command whose output is collected; `wait_for` blocks until a line matches."""

    def __init__(self, *words: str, env: dict[str, str] | None = None) -> None:
        self.words = words
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "outrider", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | (env or {}),
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, pattern: str, *, after: int = 0) -> re.Match[str]:
        """The first line from number `after` on that has `pattern`; AssertionError with all output when none comes."""
        expression = re.compile(pattern)

        def found() -> re.Match[str] | None:
            return next(filter(None, map(expression.search, self.lines[after:])), None)

        with self._news:
            self._news.wait_for(lambda: found() or self._ended, _START_TIMEOUT_S)
        match = found()
        assert match is not None, f"no line has {pattern!r}:\n" + "\n".join(self.lines[-40:])
        return match

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signals the process and returns its exit code."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        try:
            return self.popen.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            self._reader.join()
            assert self.popen.stdout is not None
            self.popen.stdout.close()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            with self._news:
                self.lines.append(line.rstrip())
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()


class Stack:
    """`outrider serve` and clients of it."""

    def __init__(self, process: Process, url: str) -> None:
        self.process = process
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=300.0)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300.0)

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.openai.close()

    def generate(self, input_ids: list[int], *, speculate: bool = True, **sampling: object) -> dict:
        """The whole answer of SGLang's /generate to ids."""
        body: dict[str, object] = {"input_ids": input_ids, "sampling_params": sampling}
        if not speculate:
            body["speculative"] = {"enabled": False}
        response = self.http.post("/generate", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def child(self, name: str) -> int:
        """Process id of a part."""
        parent = self.process.popen.pid
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (path / "cmdline").read_bytes().split(b"\0")
                stat = (path / "stat").read_text().rpartition(")")[2].split()
                if int(stat[1]) == parent and name.encode() in words[:6]:
                    return int(path.name)
        raise AssertionError(f"{name} does not run")


@contextlib.contextmanager
def serve(*flags: str, env: dict[str, str] | None = None) -> Iterator[Stack]:
    """Runs `outrider serve` with the flags given, and sees to it that it ends cleanly."""
    process = Process("serve", "--port=0", *flags, env=env)
    try:
        url = process.wait_for(r"at (http://\S+)").group(1)
        with Stack(process, url) as stack:
            yield stack
    except BaseException:
        process.stop(signal.SIGKILL)
        raise
    assert process.stop() == 0, "\n".join(process.lines[-40:])


@contextlib.contextmanager
def part(*words: str, ready: str = "serves") -> Iterator[Process]:
    """Runs one part as a process of its own, and stops it."""
    process = Process(*words)
    try:
        process.wait_for(ready)
        yield process
    finally:
        process.stop()


@contextlib.contextmanager
def socket_folder() -> Iterator[Path]:
    """A folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="or-") as folder:
        yield Path(folder)
