"""What is told of a training while it goes on: to TensorBoard, to a file, and on the terminal."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

from outrider.telemetry import announce
from training.args import HeadArgs
from training.checkpoints import Checkpoint
from training.losses import Report
from training.ranks import Ranks


class Writer:
    """TensorBoard, and a line now and then where no terminal is."""

    def __init__(self, folder: Path, seen: int) -> None:
        """seen: tokens; what was noted of later ones, before a training was cut, is taken back."""
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=seen + 1)
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
                self._board.add_scalar(f"{name}/step_{index}", value, at.seen)
        self._board.add_scalar("tokens_per_s", self._tokens / (time.monotonic() - self._started), at.seen)

    def evaluated(self, at: Checkpoint, figures: dict[str, float]) -> None:
        """Accept lengths were measured."""
        for name, value in figures.items():
            if name not in ("seen", "loss"):
                self._board.add_scalar(f"accept_length/{name}", value, at.seen)
        self._board.flush()
        with (self._folder / "history.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in at.history)
        rate = self._tokens / (time.monotonic() - self._started)
        said = ", ".join(f"{name} {value:.3f}" for name, value in figures.items() if name != "seen")
        announce(f"{at.seen:,} tokens, epoch {at.plan.epoch}, {rate:.0f} tokens/s: {said}")

    def close(self) -> None:
        """Flushes."""
        self._board.close()


class _Silent(Writer):
    """The writer of all ranks but the first."""

    def __init__(self) -> None:
        pass

    def step(self, at: Checkpoint, report: Report, tokens: int) -> None:
        """Does nothing."""

    def evaluated(self, at: Checkpoint, figures: dict[str, float]) -> None:
        """Does nothing."""


@contextlib.contextmanager
def writer_of(args: HeadArgs, ranks: Ranks, seen: int) -> Iterator[Writer]:
    """This rank's, closed at the end: only the first one says anything."""
    if not ranks.is_first:
        yield _Silent()
        return
    writer = Writer(Path(args.output), seen)
    try:
        yield writer
    finally:
        writer.close()
