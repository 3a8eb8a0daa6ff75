"""A model card: what a head was trained on and how, and how to make it again."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping
from typing import Any

from outrider.flags import flag_named
from training.args.head import read
from training.checkpoints import Checkpoint
from training.data.store import MADE_WITH

# Which of a training's facts are no flags.
_NOT_FLAGS = {"target", MADE_WITH}
_SHAPES = ("chain", "tree")
# What a card tells of each, and what it may be.
_TOLD = {"num_rounds": int, "accept_length": int | float}
# Which say the target, so that its data needs them too; all that is known where data.json does not say more.
_OF_TARGET = ("model_path", "revision", "load_format", "dtype")


Figures = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""What `train eval --output` writes: by category, of chains and of trees."""


def figures_fault(found: object) -> str | None:
    """What of JSON is not as Figures are, as far as a card tells them; None where nothing is."""
    if not isinstance(found, dict) or "all" not in found:
        return "it has no `all`"
    for category, shape in itertools.product(found, _SHAPES):
        rounds = found[category].get(shape) if isinstance(found[category], dict) else None
        for name, kinds in _TOLD.items():
            value = rounds.get(name) if isinstance(rounds, dict) else None
            if not isinstance(value, kinds) or isinstance(value, bool):
                return f"{category}.{shape}.{name} is no number"
    return None


def card(checkpoint: Checkpoint, target: str, figures: Figures | None = None) -> str:
    """Markdown, from the checkpoint, and accept length by category where it was measured."""
    facts = checkpoint.facts
    lines = [
        f"# {facts['algorithm']} draft head for {target}",
        "",
        f"Trained with `outrider train head` on {checkpoint.seen:,} tokens of the target's own conversations "
        f"({checkpoint.step:,} steps, {checkpoint.plan.epoch + 1} epochs begun, {checkpoint.plan.num_shards} shards).",
        "",
        f"It drafts {len(checkpoint.drafted):,} tokens of the target's vocabulary."
        if facts["algorithm"] == "EAGLE3"
        else f"Its loss was over the {len(checkpoint.drafted):,} most frequent tokens.",
        "",
        "## Accept length",
        "",
        *_history(checkpoint.history),
        "",
        "Tokens committed per round at temperature 0, the bonus counted: `chain` with three drafts, `tree` with eight",
        "nodes, here on every fourth text; `prompts_*` on greedy answers to the evaluation's prompts, others on",
        "conversations held out; `loss` is the first step's cross-entropy over the last batches.",
        *(_by_category(figures) if figures else []),
        "",
        "## Making it again",
        "",
        *_weights(facts),
        *([] if facts.get(MADE_WITH) else ["What else the data was made with is not known.", ""]),
        "```console",
        *(f"$ {command}" for command in _data_commands(facts)),
        f"$ {_command(facts, checkpoint.seen)}",
        "```",
    ]
    return "\n".join(lines) + "\n"


def _weights(facts: dict[str, Any]) -> list[str]:
    return [f"Target weights `{facts['target']}`.", ""] if "target" in facts else []


def _by_category(figures: Figures) -> list[str]:
    lines = ["", "| category | chain | tree |", "|---|---|---|"]
    for category, found in figures.items():
        cells = [f"{found[shape]['accept_length']:.2f}" if found[shape]["num_rounds"] else "" for shape in _SHAPES]
        lines.append(f"| {category} | " + " | ".join(cells) + " |")
    return lines


def _history(history: list[dict[str, Any]]) -> list[str]:
    """A table of at most ten evaluations, the last among them."""
    if not history:
        return ["Not measured while training."]
    step = -(-len(history) // 10)
    rows = history[::-1][::step][::-1]
    names = [name for name in history[-1] if name != "seen"]
    lines = ["| tokens seen | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for row in rows:
        cells = [f"{row[name]:.3f}" if name in row else "" for name in names]
        lines.append(f"| {row['seen']:,} | " + " | ".join(cells) + " |")
    return lines


def _data_commands(facts: dict[str, Any]) -> list[str]:
    calls = facts.get(MADE_WITH) or [{name: facts[name] for name in _OF_TARGET if name in facts}]
    return [shlex.join(["outrider", "train", "data", "--output", "data", *_flags(call)]) for call in calls]


def _command(facts: dict[str, Any], seen: int) -> str:
    words = ["outrider", "train", "head", "--data", "data", "--output", "head"]
    return shlex.join([*words, *_flags({"tokens": seen} | read(facts))])  # older ones do not know what was asked for


def _flags(facts: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in facts.items():
        if name not in _NOT_FLAGS and value is not None and value is not False:
            for each in value if isinstance(value, list) else [value]:
                words += [flag_named(name), *([] if each is True else [str(each)])]
    return words
