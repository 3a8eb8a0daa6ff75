"""Accept length, computed: what rounds of drafting and verification would commit on answers that are known.

Where the target is greedy its answer is known beforehand, so a round's outcome is too: a chain or a tree drafted below
a committed token is accepted as far as it agrees. Every possible round of an answer is computed at once; then the
rounds that would have taken place are walked. Counts as the services do: tokens committed per round, the bonus with
them; an answer's first token comes with its prompt and is no round's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from engine.models.heads.base import Head
from kernels.tree_build import build_tree, expand_frontier, expand_root
from training.attending import Branches, RootRows
from training.batches import Batch, padded_groups
from training.data.store import Example
from training.kinds import Kind
from training.losses import unrolled
from training.target_states import States

CHAIN_STEPS = 3


@dataclass(frozen=True, slots=True)
class Tree:
    """Shape of drafted trees: num_nodes counts the root, as SGLang's num_draft_tokens does."""

    num_steps: int = 5
    topk: int = 4
    num_nodes: int = 8


class Target(Protocol):
    """The model that states come from."""

    device: torch.device

    def __call__(self, conversations: Sequence[np.ndarray]) -> States:
        """See TargetStates."""
        ...


class Drafting(Protocol):
    """A network that is trained, or one that is published."""

    @property
    def kind(self) -> Kind:
        """The kind of network."""
        ...

    def built(self) -> Head:
        """The network as it is now."""
        ...


@dataclass(slots=True)
class Rounds:
    """Rounds counted, and tokens that they committed."""

    num_rounds: int = 0
    num_committed: int = 0
    accepted_by_step: list[int] = field(default_factory=list)
    """How many rounds accepted more than i drafts."""

    @property
    def accept_length(self) -> float:
        """Committed per round; 1 when there was none."""
        return self.num_committed / self.num_rounds if self.num_rounds else 1.0

    def add(self, other: Rounds) -> None:
        """Counts the rounds of `other` too."""
        self.num_rounds += other.num_rounds
        self.num_committed += other.num_committed
        longest = max(len(self.accepted_by_step), len(other.accepted_by_step))
        both = (counts + [0] * (longest - len(counts)) for counts in (self.accepted_by_step, other.accepted_by_step))
        self.accepted_by_step = [left + right for left, right in zip(*both, strict=True)]

    def walk(self, accepted: Sequence[int], first: int, end: int) -> None:
        """The rounds of an answer: accepted[p] drafts would be below position p; the roots are first..end-2."""
        root = first
        while root < end - 1:
            count = min(accepted[root], end - 2 - root)
            self.num_rounds += 1
            self.num_committed += count + 1
            self.accepted_by_step += [0] * (count - len(self.accepted_by_step))
            for step in range(count):
                self.accepted_by_step[step] += 1
            root += count + 1


@torch.inference_mode()
def chain_rounds(
    network: Drafting, target: Target, examples: Sequence[Example], *, num_steps: int = CHAIN_STEPS,
    batch_tokens: int = 2048,
) -> Rounds:  # fmt: skip
    """Counts rounds with chains of num_steps drafts."""
    rounds = Rounds()
    for group in padded_groups(examples, batch_tokens):
        batch = Batch.of(group, target.device)
        states = target(batch.conversations)
        accepted = _chain_accepts(network.kind, network.built(), batch, states, num_steps)
        for row, example in enumerate(group):
            for start, end in example.answers:
                rounds.walk(accepted[row], start, end)
    return rounds


def _chain_accepts(kind: Kind, head: Head, batch: Batch, states: States, num_steps: int) -> list[list[int]]:
    """Drafts that agree with what came, by conversation and position of the root."""
    batch_size, length = batch.tokens.shape
    agreed = torch.zeros((batch_size, length), dtype=torch.int64, device=batch.tokens.device)
    running = torch.ones((batch_size, length - kind.shift), dtype=torch.bool, device=batch.tokens.device)
    for step in unrolled(kind, head, batch, states, num_steps):
        correct = torch.zeros_like(running)
        came = batch.tokens[:, step.predicted_pos.clamp(max=length - 1)][step.rows]
        correct[step.rows] = _ids(head, head.logits(step.outputs).argmax(dim=-1)) == came
        running = running & correct
        agreed[:, kind.shift :] += running
    return agreed.tolist()


@torch.inference_mode()
def tree_rounds(network: Drafting, target: Target, examples: Sequence[Example], tree: Tree | None = None) -> Rounds:
    """Counts rounds with trees, the likeliest nodes of all steps kept (EAGLE-2)."""
    rounds, tree = Rounds(), tree or Tree()
    for example in examples:
        batch = Batch.of([example], target.device)
        states = target(batch.conversations)
        for start, end in example.answers:
            accepted = _tree_accepts(network.kind, network.built(), batch, states, tree, start, end)
            rounds.walk(accepted, start, end)
    return rounds


def _tree_accepts(
    kind: Kind, head: Head, batch: Batch, states: States, tree: Tree, start: int, end: int
) -> list[int]:  # fmt: skip
    """Drafts accepted below each position; those before `start` and after `end` are left 0."""
    tokens = batch.tokens[0]
    device, num_rows = tokens.device, len(tokens) - kind.shift
    below = RootRows(1, kind.config.block.num_layers, kind.config.block.windows)
    fused = head.fuse(states.features[0, :num_rows].to(head.dtype)) if kind.shift else tokens.new_empty((num_rows, 0))
    every = torch.arange(num_rows, device=device)
    outputs = head.forward(tokens[kind.shift :], fused, every, below.attend)
    roots = torch.arange(start - kind.shift, end - 1 - kind.shift, device=device)
    if not len(roots):
        return [0] * len(tokens)
    outputs = outputs[roots]
    expansions = [expand_root(*_topk(head, outputs, tree.topk))]
    branches = Branches(below, roots, tree.topk)
    outputs = outputs[:, None].expand(-1, tree.topk, -1)
    for step in range(1, tree.num_steps):
        parents = expansions[-1].frontier_parents
        branches.reorder(parents[None])
        carried = head.carried(outputs.gather(1, parents[:, :, None].expand(-1, -1, outputs.shape[2])).flatten(0, 1))
        positions = (roots + step).repeat_interleave(tree.topk)
        flat = head.forward(expansions[-1].frontier_tokens.flatten(), carried, positions, branches.attend)
        probabilities, ids = _topk(head, flat, tree.topk)
        shape = (len(roots), tree.topk, tree.topk)
        expansions.append(expand_frontier(expansions[-1], probabilities.view(shape), ids.view(shape), step))
        outputs = flat.unflatten(0, (len(roots), tree.topk))
    committed = roots + kind.shift
    drafted = build_tree(tokens[committed], expansions, tree.num_nodes)
    accepted = _agreeing(drafted.tokens, drafted.parents, tokens, committed, end)
    found = [0] * len(tokens)
    found[start : end - 1] = accepted.tolist()
    return found


def _agreeing(
    nodes: torch.Tensor, parents: torch.Tensor, tokens: torch.Tensor, roots: torch.Tensor, end: int
) -> torch.Tensor:
    """int64 [R]: how deep each tree [R, N] agrees with what follows its root, within the answer."""
    at = torch.zeros_like(roots)
    going = torch.ones_like(roots, dtype=torch.bool)
    depth = torch.zeros_like(roots)
    for step in range(1, nodes.shape[1]):
        came = tokens[(roots + step).clamp(max=len(tokens) - 1)]
        match = (parents == at[:, None]) & (nodes == came[:, None])
        going = going & match.any(dim=1) & (roots + step < end)
        at = torch.where(going, match.long().argmax(dim=1), at)
        depth += going
    return depth


def _topk(head: Head, outputs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    found = head.logits(outputs).softmax(dim=-1).topk(count, dim=-1)
    return found.values, _ids(head, found.indices)


def _ids(head: Head, rows: torch.Tensor) -> torch.Tensor:
    return rows if head.tokens is None else head.tokens[rows]
