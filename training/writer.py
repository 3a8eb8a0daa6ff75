"""What is told of a training while it goes on: to TensorBoard, to a file, and on the terminal."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter

from outrider.telemetry import announce
from training.args import HeadArgs
from training.checkpoints import Checkpoint
from training.losses import Report
from training.outputs import write_file, writing
from training.ranks import Ranks


class Writer:
    """TensorBoard, and a line now and then where no terminal is."""

    def __init__(self, folder: Path, seen: int) -> None:
        """seen: tokens; what was noted of later ones, before a training was cut, is taken back."""
        self._board = _Board(folder / "tensorboard", seen + 1)
        self._folder = folder
        self._started, self._tokens = time.monotonic(), 0

    def step(self, at: Checkpoint, report: Report, tokens: int) -> None:
        """Notes that a step was made."""
        self._tokens += tokens
        if at.step % 10:
            return
        for name, values in (("token_loss", report.token_losses), ("accuracy", report.accuracies),
                             ("feature_loss", report.feature_losses)):  # fmt: skip
            for index, value in enumerate(values):
                self._board.add(f"{name}/step_{index}", value, at.seen)
        self._board.add("tokens_per_s", self._tokens / (time.monotonic() - self._started), at.seen)

    def evaluated(self, at: Checkpoint, figures: dict[str, float]) -> None:
        """Accept lengths were measured."""
        for name, value in figures.items():
            if name not in ("seen", "loss"):
                self._board.add(f"accept_length/{name}", value, at.seen)
        lines = "".join(json.dumps(row) + "\n" for row in at.history)
        write_file(self._folder / "history.jsonl", "the history", lambda path: path.write_text(lines, encoding="utf-8"))
        rate = self._tokens / (time.monotonic() - self._started)
        said = ", ".join(f"{name} {value:.3f}" for name, value in figures.items() if name != "seen")
        announce(f"{at.seen:,} tokens, epoch {at.plan.epoch}, {rate:.0f} tokens/s: {said}")


class _Board:
    """A file of TensorBoard's. SummaryWriter has a thread for it, which tells of a full disk in a page of its own."""

    def __init__(self, folder: Path, first_step: int) -> None:
        with writing(folder, "the log for TensorBoard"):
            folder.mkdir(exist_ok=True)
        self._path = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._write(Event(file_version="brain.Event:2"))
        self._write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, name: str, value: float, step: int) -> None:
        """A point of a curve."""
        self._write(Event(step=step, summary=Summary(value=[Summary.Value(tag=name, simple_value=value)])))

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        with writing(self._path, "the log for TensorBoard"), self._path.open("ab") as file:
            RecordWriter(file).write(event.SerializeToString())


class _Silent(Writer):
    """The writer of all ranks but the first."""

    def __init__(self) -> None:
        pass

    def step(self, at: Checkpoint, report: Report, tokens: int) -> None:
        """Does nothing."""

    def evaluated(self, at: Checkpoint, figures: dict[str, float]) -> None:
        """Does nothing."""


def writer_of(args: HeadArgs, ranks: Ranks, seen: int) -> Writer:
    """This rank's: only the first one says anything."""
    return Writer(Path(args.output), seen) if ranks.is_first else _Silent()
