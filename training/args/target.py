"""Settings that name the target of a training, and where it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outrider.flags import MAX_THREADS, Args, arg, at_least, at_most, check_device

MT_BENCH = Path(__file__).parent.parent / "data" / "mt_bench.jsonl"
"""The benchmark that heads are judged by; its questions are kept out of the data."""


@dataclass(frozen=True, kw_only=True)
class WeightsArgs(Args):
    """The flags that name the target's weights."""

    model_path: str | None = arg(
        None, "target", "Local Hugging Face folder, or a hub id. Default: the embedded SmolLM2-135M-Instruct.",
        aliases=("--model",),
    )  # fmt: skip
    revision: str | None = arg(None, "target", "Revision of a hub id.")
    load_format: Literal["auto", "safetensors", "pt", "dummy"] = arg("auto", "target", "Form of the target's weights.")


@dataclass(frozen=True, kw_only=True)
class TargetArgs(WeightsArgs):
    """Which target, and where it runs."""

    dtype: Literal["auto", "bfloat16", "float32", "float16"] = arg("auto", "target", "The target's compute dtype.")
    device: str = arg("auto", "target", "cpu, cuda or cuda:N.")
    threads: int | None = arg(None, "target", "CPU threads. Default: all cores, or a control group's CPU limit.")

    def check(self) -> None:
        """Checks bounds."""
        at_least(self, 1, "threads")
        at_most(self, MAX_THREADS, "threads")
        check_device(self.device)
