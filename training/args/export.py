"""Settings of the commands that write what was trained: a head, a map of tokens, a packed head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from outrider.errors import StartupError
from outrider.flags import Args, arg, at_least
from training.args.target import WeightsArgs


@dataclass(frozen=True, kw_only=True)
class ExportArgs(WeightsArgs):
    """Settings of `outrider train export`."""

    command: ClassVar[str] = "train export"
    summary: ClassVar[str] = "Write a trained head as config.json and safetensors, as SGLang, vLLM and EAGLE read them."

    checkpoint: str = arg("", "export", "Output folder of `train head`.")
    output: str = arg("", "export", "Folder for the head.")
    figures: str | None = arg(
        None, "export", "File that `train eval --output` wrote: accept length by category, for the model card."
    )
    best: bool = arg(False, "export", "The checkpoint of the best evaluation instead of the last.")

    def check(self) -> None:
        """Checks both folders."""
        if not self.checkpoint or not self.output:
            raise StartupError("--checkpoint and --output are needed: the folder of the training, and one for the head")


@dataclass(frozen=True, kw_only=True)
class TokenMapArgs(Args):
    """Settings of `outrider train token-map`."""

    command: ClassVar[str] = "train token-map"
    summary: ClassVar[str] = (
        "Make FR-Spec's map of hot tokens from the data: the most frequent in the target's answers."
    )

    data: str = arg("", "map", "Folder with the data.")
    output: str = arg("", "map", "File: .safetensors, or .pt for SGLang.")
    size: int = arg(8192, "map", "Tokens in the map, most frequent first.")

    def check(self) -> None:
        """Checks both paths."""
        if not self.data or not self.output:
            raise StartupError("--data and --output are needed: the folder with the data, and a file for the map")
        if not self.output.endswith((".safetensors", ".pt")):
            raise StartupError(f"--output is {self.output!r}; a .safetensors or .pt file is needed")
        at_least(self, 1, "size")


@dataclass(frozen=True, kw_only=True)
class PackArgs(Args):
    """Settings of `outrider train pack`."""

    command: ClassVar[str] = "train pack"
    summary: ClassVar[str] = "Pack an exported head into the int8 form in which heads are shipped with Outrider."

    head: str = arg("", "pack", "Folder of the exported head.")
    algorithm: Literal["EAGLE", "EAGLE3", "NEXTN", "STANDALONE"] = arg("EAGLE3", "pack", "What it is served as.")
    model_path: str | None = arg(None, "pack", "The target that it was trained for. Default: the embedded model.")
    revision: str | None = arg(None, "pack", "Revision of a hub id.")
    output: str | None = arg(None, "pack", "File to write. Default: where Outrider looks for shipped heads.")

    def check(self) -> None:
        """Checks the head's folder."""
        if not self.head:
            raise StartupError("--head is needed: the folder of an exported head")
