"""Settings of `outrider train data`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from outrider.errors import StartupError
from outrider.flags import arg, at_least, flag_named
from training.args.target import MT_BENCH, TargetArgs

if TYPE_CHECKING:
    from training.data.conversations import Mix

_MOST_SLOTS = 2**31 - 1  # what a pool can number


@dataclass(frozen=True, kw_only=True)
class DataArgs(TargetArgs):
    """Settings of `outrider train data`."""

    command: ClassVar[str] = "train data"
    summary: ClassVar[str] = (
        "Make training data: prompts sampled from the target or composed, and the target's answers."
    )

    output: str = arg("", "data", "Folder for the data; what is there already is gone on with.")
    tokens: int = arg(3_000_000, "data", "Answer tokens wanted, those already there included.")
    seed: int = arg(0, "data", "Everything random follows from it.")
    prompts: tuple[str, ...] = arg(
        (), "data", "JSONL file of prompts or conversations to answer first: `messages`, `conversations`, `turns`, "
        "`prompt` or plain strings. Repeatable.",
    )  # fmt: skip
    exclude: tuple[str, ...] = arg(
        (), "data", "JSONL file of a benchmark's prompts; nothing that shares eight words in a row with one is asked. "
        "`none` for no such file. Repeatable. Default: MT-bench's.",
    )  # fmt: skip
    sampled_share: float = arg(0.5, "data", "Share of conversations whose first prompt the target itself makes up.")
    passage_share: float = arg(0.06, "data", "Share in which the target writes a text and is then asked about it.")
    greedy_share: float = arg(0.9, "data", "Share of conversations answered at temperature 0; the others at 0.7.")
    more_turns_share: float = arg(0.2, "data", "Share of conversations that get a second turn.")
    share: str = arg(
        "1/1",
        "data",
        "K/N: make every Nth conversation from the Kth on; N processes with one --output fill it together.",
    )
    quantization: str | None = arg(
        None, "data", "Quantise the target that writes the data: int8_dynamic makes a quarter more of it on a CPU."
    )
    store_states: str | None = arg(
        None, "data", "Folder to keep the target's states in, for `train head --store-states`: they are there anyway."
    )
    batch_size: int = arg(64, "data", "Conversations at a time.")
    max_len: int = arg(1024, "data", "Longest conversation, in tokens.")

    def check(self) -> None:
        """Checks bounds."""
        super().check()
        if not self.output:
            raise StartupError("--output is needed: the folder to keep the data in")
        at_least(self, 1, "tokens", "batch_size")
        at_least(self, 256, "max_len")
        if (self.batch_size + 1) * self.max_len > _MOST_SLOTS:
            raise StartupError(
                f"--batch-size {self.batch_size} and --max-len {self.max_len} ask for {self.batch_size + 1} times "
                f"{self.max_len} tokens at a time; there must be at most {_MOST_SLOTS}"
            )
        at_least(self, 0, "seed")
        for name in ("sampled_share", "passage_share", "greedy_share", "more_turns_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise StartupError(f"{flag_named(name)} is {getattr(self, name)}; it must be from 0 to 1")
        if (both := self.sampled_share + self.passage_share) > 1:
            raise StartupError(
                f"--sampled-share {self.sampled_share} and --passage-share {self.passage_share} are {both:g} together; "
                "they must be at most 1"
            )
        self.share_of()

    def share_of(self) -> tuple[int, int]:
        """Which conversations are ours: (k, n), k from 1 to n."""
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", self.share, re.ASCII)
        number, count = (int(digits) for digits in found.groups()) if found else (0, 0)
        if not 1 <= number <= count:
            raise StartupError(f"--share is {self.share!r}; it must be K/N, K from 1 to N")
        return number, count

    def exclude_paths(self) -> list[Path]:
        """The files of prompts that must not be asked."""
        if self.exclude == ("none",):
            return []
        return [Path(path) for path in self.exclude] or [MT_BENCH]

    def mix(self) -> Mix:
        """The shares."""
        from training.data.conversations import Mix

        return Mix(self.sampled_share, self.passage_share, self.greedy_share, self.more_turns_share)
