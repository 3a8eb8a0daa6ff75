"""Conversations from disk as padded batches, in an order that follows from the seed alone.

Shards written while training runs are taken in at the next epoch. What an epoch is made of is a `Plan`, which a
checkpoint keeps: going on from it gives the batches that would have come.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from outrider.errors import StartupError
from training.data.store import Example, Origin, read_examples, shard_paths

# One conversation in so many is kept for evaluation and never trained on.
HELD_OUT = 50
# Conversations of like length are batched together within windows of so many: little padding, still well mixed.
WINDOW = 512


@dataclass(frozen=True, slots=True)
class Batch:
    """Conversations side by side, padded with token 0 at their ends."""

    conversations: list[np.ndarray]
    tokens: torch.Tensor
    """int64 [B, L]"""
    wanted: torch.Tensor
    """bool [B, L]: tokens that the target wrote; what a head learns to draft."""
    lengths: torch.Tensor
    """int64 [B]"""
    origins: list[Origin]
    """Where the conversations stand on disk."""

    @property
    def num_tokens(self) -> int:
        """Tokens, padding not counted."""
        return int(self.lengths.sum())

    def to(self, device: torch.device) -> Batch:
        """The batch with its tensors on `device`."""
        tokens, wanted, lengths = self.tokens.to(device), self.wanted.to(device), self.lengths.to(device)
        return Batch(self.conversations, tokens, wanted, lengths, self.origins)

    @classmethod
    def of(cls, examples: Sequence[Example], device: torch.device | str = "cpu") -> Batch:
        """Puts examples side by side."""
        lengths = [len(example.tokens) for example in examples]
        tokens = torch.zeros((len(examples), max(lengths)), dtype=torch.int64)
        wanted = torch.zeros_like(tokens, dtype=torch.bool)
        for row, example in enumerate(examples):
            tokens[row, : lengths[row]] = torch.from_numpy(example.tokens)
            for start, end in example.answers:
                wanted[row, start:end] = True
        return cls(
            [example.tokens for example in examples], tokens.to(device), wanted.to(device),
            torch.tensor(lengths, device=device), [example.origin for example in examples],
        )  # fmt: skip


@dataclass(slots=True)
class Plan:
    """Where training stands in its data: the epoch, the shards that it is made of, and batches behind us."""

    epoch: int = 0
    num_shards: int = 0
    num_batches: int = 0


class Dataset:
    """The conversations of a data folder. Each of `num_ranks` processes gets its share of every epoch.

    least: called by all of them, each with a number, gives the smallest.
    """

    def __init__(
        self, folder: Path, *, seed: int, batch_tokens: int, max_len: int, rank: int = 0, num_ranks: int = 1,
        least: Callable[[int], int] = int,
    ) -> None:  # fmt: skip
        self.folder = folder
        self._seed = seed
        self._batch_tokens = batch_tokens
        self._max_len = max_len
        self._rank, self._num_ranks, self._least = rank, num_ranks, least
        self._shards: list[list[Example]] = []
        if not shard_paths(folder):
            raise StartupError(f"{folder} holds no training data; `outrider train data --output {folder}` makes it")

    def batches(self, plan: Plan) -> Iterator[Batch]:
        """Batches from `plan` on, for ever; `plan` follows."""
        while True:
            if plan.num_batches == 0:
                plan.num_shards = self._least(len(shard_paths(self.folder)))  # another may be written just now
            groups = self._groups(plan)
            if not groups:
                raise StartupError(f"{self.folder} holds too little data for a batch for each of {self._num_ranks}")
            while plan.num_batches < len(groups):
                plan.num_batches += 1
                yield Batch.of(groups[plan.num_batches - 1])
            plan.epoch, plan.num_batches = plan.epoch + 1, 0

    def once(self) -> Iterator[Batch]:
        """All batches of the first epoch, the same on every rank."""
        alone = Dataset(self.folder, seed=self._seed, batch_tokens=self._batch_tokens, max_len=self._max_len)
        for group in alone._groups(Plan(num_shards=len(shard_paths(self.folder)))):
            yield Batch.of(group)

    def examples(self, num_shards: int, *, held_out: bool) -> list[Example]:
        """Examples of the first shards that are trained on, or held out; cut to max_len."""
        paths = shard_paths(self.folder)
        while len(self._shards) < min(num_shards, len(paths)):
            self._shards.append([self._cut(example) for example in read_examples(paths[len(self._shards)])])
        every = [example for shard in self._shards[:num_shards] for example in shard]
        return [example for example in every if example.answers and is_held_out(example) == held_out]

    def held_out(self, limit: int) -> list[Example]:
        """The first `limit` greedy ones that are held out."""
        every = self.examples(len(shard_paths(self.folder)), held_out=True)
        return [example for example in every if example.temperature == 0][:limit]

    def _groups(self, plan: Plan) -> list[list[Example]]:
        """This rank's batches of the plan's epoch; every rank gets as many."""
        rng = random.Random(f"{self._seed}/{plan.epoch}")
        examples = self.examples(plan.num_shards, held_out=False)
        rng.shuffle(examples)
        groups: list[list[Example]] = []
        for start in range(0, len(examples), WINDOW):
            groups += padded_groups(examples[start : start + WINDOW], self._batch_tokens)
        rng.shuffle(groups)
        usable = len(groups) // self._num_ranks * self._num_ranks
        return groups[self._rank : usable : self._num_ranks]

    def _cut(self, example: Example) -> Example:
        limit = min(self._max_len, self._batch_tokens)
        answers = tuple((start, min(end, limit)) for start, end in example.answers if start < limit)
        return replace(example, tokens=example.tokens[:limit], answers=answers)


def padded_groups(examples: Sequence[Example], batch_tokens: int) -> list[list[Example]]:
    """All of them, shortest first, in groups whose padded size keeps within batch_tokens."""
    groups: list[list[Example]] = [[]]
    for example in sorted(examples, key=lambda one: len(one.tokens)):
        if groups[-1] and (len(groups[-1]) + 1) * len(example.tokens) > batch_tokens:
            groups.append([])
        groups[-1].append(example)
    return [group for group in groups if group]


def is_held_out(example: Example) -> bool:
    """Whether a conversation is for evaluation: a matter of its own tokens, so it stays so as data grows.

    Conversations with one first turn go the same way: only what comes before the first answer counts.
    """
    prompt = example.tokens[: example.answers[0][0]] if example.answers else example.tokens
    digest = hashlib.blake2b(prompt.astype(np.int64).tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % HELD_OUT == 0
