"""Settings of `outrider train head`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from outrider.args import HEAD_ALGORITHMS
from outrider.errors import StartupError
from outrider.flags import above_zero, arg, at_least, flag_named
from training.args.target import TargetArgs

# By setting, the algorithms whose training reads it; all read the others.
_READ_BY = {
    "no_fc_norm": ("EAGLE3",),
    "train_output_head": ("EAGLE3",),
    "num_kv_heads": HEAD_ALGORITHMS,
    "num_layers": ("STANDALONE",),
    "unroll": HEAD_ALGORITHMS,
    "unroll_every": HEAD_ALGORITHMS,
    "feature_loss": ("EAGLE",),
}


def read(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A training's facts without settings that do nothing with its others, which older trainings took."""
    nothing = {name for name, readers in _READ_BY.items() if facts["algorithm"] not in readers}
    if facts.get("optimizer", "muon") != "muon":
        nothing.add("weight_decay")
    return {name: value for name, value in facts.items() if name not in nothing}


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
    unroll: int = arg(3, "training", "Steps that a head goes on from its own outputs.")
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
        """StartupError for what is out of bounds or would do nothing."""
        super().check()
        if not self.data or not self.output:
            raise StartupError("--data and --output are needed: the folder with the data, and the one for the head")
        at_least(
            self, 1, "num_kv_heads", "num_layers", "tokens", "accumulate", "unroll", "unroll_every", "eval_every",
            "eval_conversations", "eval_answer_tokens", "save_every",
        )  # fmt: skip
        at_least(self, 0, "warmup_tokens", "average_tokens", "seed", "weight_decay", "token_loss", "feature_loss")
        at_least(self, 16, "max_len", "batch_tokens", "draft_vocab_size")
        above_zero(self, "learning_rate", "clip_norm")
        for name, readers in _READ_BY.items():
            if self.algorithm not in readers and getattr(self, name) != getattr(HeadArgs, name):
                raise StartupError(f"{flag_named(name)} is for {', '.join(readers)}; --algorithm is {self.algorithm}")
        if self.optimizer != "muon" and self.weight_decay != HeadArgs.weight_decay:
            raise StartupError(f"--weight-decay is for --optimizer muon; it is {self.optimizer}")
