"""Settings of `outrider train eval`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from outrider.errors import StartupError
from outrider.flags import arg, at_least, at_most
from outrider.tree_limits import MAX_WISH, most_nodes
from training.args.target import MT_BENCH, TargetArgs

_TREE_TOKENS = 8  # as SGLang's trees for Llama targets have


@dataclass(frozen=True, kw_only=True)
class EvalArgs(TargetArgs):
    """Settings of `outrider train eval`."""

    command: ClassVar[str] = "train eval"
    summary: ClassVar[str] = "Accept length of a head by category, computed in this process or through the services."

    head: str = arg("", "evaluation", "Folder of an exported head, or a training's output folder.")
    prompts: str | None = arg(None, "evaluation", "JSONL file with `turns` (and `category`). Default: MT-bench's.")
    answer_tokens: int = arg(128, "evaluation", "Most tokens of an answer.")
    max_prompts: int | None = arg(None, "evaluation", "At most so many prompts. Default: all.")
    steps: int = arg(3, "evaluation", "Drafts of a chain.")
    tree_steps: int = arg(5, "evaluation", "Depth of a tree.")
    tree_topk: int = arg(4, "evaluation", "Branches of a node.")
    tree_tokens: int | None = arg(
        None, "evaluation",
        "Nodes of a tree, root counted; 0 leaves trees out. Default: 8, or what steps and branches give at most.",
    )  # fmt: skip
    serve: bool = arg(False, "evaluation", "Measure through `outrider serve`: real services, real drafters.")
    output: str | None = arg(None, "evaluation", "JSON file for the figures.")

    def check(self) -> None:
        """Checks bounds."""
        super().check()
        if not self.head:
            raise StartupError("--head is needed: the folder of an exported head, or a training's output folder")
        at_least(self, 1, "answer_tokens", "max_prompts", "steps", "tree_steps", "tree_topk")
        at_most(self, MAX_WISH, "steps", "tree_steps", "tree_topk", "tree_tokens")  # as services take
        most = most_nodes(self.tree_steps, self.tree_topk) + 1
        if self.tree_tokens not in (None, 0) and not 2 <= self.tree_tokens <= most:
            raise StartupError(
                f"--tree-tokens is {self.tree_tokens}; with --tree-steps {self.tree_steps} and --tree-topk "
                f"{self.tree_topk} it must be from 2 to {most}, or 0 for no trees"
            )

    @property
    def tree(self) -> tuple[int, int, int]:
        """Steps, branches and nodes of the trees, root counted; of 0 nodes: none are measured."""
        most = most_nodes(self.tree_steps, self.tree_topk) + 1
        tokens = min(_TREE_TOKENS, most) if self.tree_tokens is None else self.tree_tokens
        return self.tree_steps, self.tree_topk, tokens

    def prompts_path(self) -> Path:
        """The file of prompts."""
        return MT_BENCH if self.prompts is None else Path(self.prompts)
