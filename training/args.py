"""Settings of `outrider train`'s commands. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from outrider.errors import StartupError
from outrider.flags import MAX_THREADS, Args, arg, at_least, at_most, check_device, flag_named
from outrider.wishes import MAX_WISH, most_nodes

if TYPE_CHECKING:
    from training.data.conversations import Mix

# In a source tree the benchmark that heads are judged by lies here.
MT_BENCH = Path(__file__).parent.parent / "tests" / "data" / "mt_bench.jsonl"


_MOST_SLOTS = 2**31 - 1  # what a pool can number
_TREE_TOKENS = 8  # as SGLang's trees for Llama targets have


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
        "`none` for no such file. Repeatable. Default: MT-bench's, in a source tree.",
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
        if self.sampled_share + self.passage_share > 1:
            raise StartupError("--sampled-share and --passage-share are more than 1 together")
        self.exclude_paths()
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
        if not self.exclude and not MT_BENCH.is_file():
            raise StartupError("--exclude is needed: a file of the benchmark prompts to keep out, or `none`")
        return [Path(path) for path in self.exclude] or [MT_BENCH]

    def mix(self) -> Mix:
        """The shares."""
        from training.data.conversations import Mix

        return Mix(self.sampled_share, self.passage_share, self.greedy_share, self.more_turns_share)


@dataclass(frozen=True, kw_only=True)
class HeadArgs(TargetArgs):
    """Settings of `outrider train head`."""

    command: ClassVar[str] = "train head"
    summary: ClassVar[str] = "Train a draft head on data that `train data` made; goes on where it was stopped."

    algorithm: Literal["EAGLE", "EAGLE3", "NEXTN", "STANDALONE"] = arg(
        "EAGLE3", "head", "EAGLE (1 and 2), EAGLE3, NEXTN (multi-token prediction), STANDALONE (a shallow copy)."
    )
    data: str = arg("", "head", "Folder with the data.")
    output: str = arg("", "head", "Folder for checkpoints, logs and the exported head.")
    draft_vocab_size: int = arg(
        8192, "head", "Most frequent tokens that are drafted (EAGLE3) or that the loss is over (the others)."
    )
    no_fc_norm: bool = arg(
        False, "head", "EAGLE3: give the target's states to `fc` as they are, for readers that know no `fc_norm`."
    )
    train_output_head: bool = arg(
        False, "head", "EAGLE3: move the output head's rows too. By default they stay the target's, which costs less."
    )
    num_kv_heads: int | None = arg(
        None,
        "head",
        "Key heads of a head's layer; none of them copy. Default: three more than the target's query heads.",
    )
    num_layers: int = arg(3, "head", "Layers of a STANDALONE draft model.")
    initial_head: str | None = arg(
        None, "head", "Folder of an exported head of the same shape to go on from, or `shipped`: the one that comes "
        "with Outrider. Default: begin with what is fitted to the target.",
    )  # fmt: skip
    tokens: int = arg(10_000_000, "training", "Tokens to see, repeated ones counted; may be raised to train longer.")
    batch_tokens: int = arg(2048, "training", "Most tokens of a batch, padding counted.")
    accumulate: int = arg(1, "training", "Batches whose gradients make one step.")
    unroll: int = arg(3, "training", "Steps that a head goes on from its own outputs; STANDALONE needs one.")
    unroll_every: int = arg(
        3, "training", "Of so many rows one goes on from its own outputs; the others teach the first step alone."
    )
    average_tokens: int = arg(
        200_000, "training", "Parameters that are measured and exported are a running mean over about so many tokens, "
        "over a quarter of all at first; 0: they are the last ones.",
    )  # fmt: skip
    learning_rate: float = arg(1e-3, "training", "Highest learning rate, after the warm-up.")
    warmup_tokens: int = arg(50_000, "training", "Tokens over which it rises.")
    weight_decay: float = arg(0.01, "training", "Of matrices that Muon moves.")
    optimizer: Literal["muon", "adamw"] = arg(
        "muon", "training", "`muon`: for the layers' matrices, AdamW for the rest."
    )
    clip_norm: float = arg(1.0, "training", "Gradients are scaled down to this norm.")
    token_loss: float = arg(1.0, "training", "Weight of the cross-entropy to the target's distribution.")
    feature_loss: float = arg(0.5, "training", "Weight of the regression to the target's states (EAGLE).")
    train_dtype: Literal["bfloat16", "float32"] = arg(
        "bfloat16", "training", "What the head computes in; parameters and optimizers stay in float32."
    )
    store_states: str | None = arg(
        None, "training", "Folder for the target's states: what `train data` kept there, and what is missing. The "
        "target runs once for each conversation at most, whatever heads and epochs there are.",
    )  # fmt: skip
    quantization: str | None = arg(
        None, "training", "Quantise the target that states and distributions come from; as in `train data` where both "
        "share --store-states. Accept length is always measured on the target as it is.",
    )  # fmt: skip
    seed: int = arg(0, "training", "Order of the data, and noise at the start.")
    max_len: int = arg(1024, "training", "Conversations are cut to so many tokens.")
    eval_every: int = arg(100_000, "evaluation", "Tokens between evaluations.")
    eval_conversations: int = arg(64, "evaluation", "Held-out greedy conversations that accept length is measured on.")
    eval_prompts: str | None = arg(
        None,
        "evaluation",
        "JSONL file of prompts (a benchmark's) whose greedy answers accept length is measured on too.",
    )
    eval_answer_tokens: int = arg(128, "evaluation", "Tokens of those answers.")
    save_every: int = arg(50_000, "evaluation", "Tokens between checkpoints.")

    def check(self) -> None:
        """Checks bounds."""
        super().check()
        if not self.data or not self.output:
            raise StartupError("--data and --output are needed: the folder with the data, and the one for the head")
        at_least(
            self, 1, "num_kv_heads", "num_layers", "tokens", "accumulate", "unroll", "unroll_every", "eval_every",
            "eval_conversations", "eval_answer_tokens", "save_every",
        )  # fmt: skip
        at_least(self, 0, "warmup_tokens", "average_tokens", "seed", "weight_decay", "token_loss", "feature_loss")
        at_least(self, 16, "max_len", "batch_tokens", "draft_vocab_size")
        if self.learning_rate <= 0 or self.clip_norm <= 0:
            raise StartupError("--learning-rate and --clip-norm must be above 0")


@dataclass(frozen=True, kw_only=True)
class EvalArgs(TargetArgs):
    """Settings of `outrider train eval`."""

    command: ClassVar[str] = "train eval"
    summary: ClassVar[str] = "Accept length of a head by category, computed in this process or through the services."

    head: str = arg("", "evaluation", "Folder of an exported head, or a training's output folder.")
    prompts: str | None = arg(
        None, "evaluation", "JSONL file with `turns` (and `category`). Default: MT-bench's, in a source tree."
    )
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
        if self.prompts is None and not MT_BENCH.is_file():
            raise StartupError("--prompts is needed: a JSONL file of prompts")

    @property
    def tree(self) -> tuple[int, int, int]:
        """Steps, branches and nodes of the trees, root counted; of 0 nodes: none are measured."""
        most = most_nodes(self.tree_steps, self.tree_topk) + 1
        tokens = min(_TREE_TOKENS, most) if self.tree_tokens is None else self.tree_tokens
        return self.tree_steps, self.tree_topk, tokens

    def prompts_path(self) -> Path:
        """The file of prompts."""
        return MT_BENCH if self.prompts is None else Path(self.prompts)


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
