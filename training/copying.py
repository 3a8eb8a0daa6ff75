"""Attention heads that start by copying: they look for the newest token where it stood before and bring what followed.

A target that repeats itself, or its prompt, does so by induction heads (Olsson et al., 2022). A draft head's one layer
can hold the whole of it, but is slow to find it by gradients. Row s reads token s + 1 and the state before it, which
still tells token s, and to a degree the one before that. So each row carries marks, a few numbers by which a token is
known again: a query is the mark of the row's token, a key the mark that the state holds, and the value is the row's
token, which followed the one that was sought.

Marks stand in the directions that the target's states use least. That is EAGLE-3's way, which reads states of lower
layers. The last state tells its own token only in part: heads that have no other are taught where to look (`looking`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.config import ModelConfig
from engine.rope import rope_rows
from kernels.rope import apply_rope
from training.looking import Taught, whitening

# Added to a layer's heads for this. They look for the same and each brings its part of the token.
NUM_COPYING = 3
# Logit of an agreement in one number of a mark.
_SHARPNESS = 0.5
# EAGLE-3: of a mark's numbers, those for the token itself; the others ask for the one before it as well.
_SHARE_NOW = 0.6
# One stream for all: numbers by which a row's token is brought, as a share of the stream.
_SHARE_BROUGHT = 1 / 6
# Pairs that rotate by less a token look equally far back and near; in radians.
_SLOW = 0.0135


@dataclass(frozen=True, slots=True)
class Marks:
    """How tokens are marked in states.

    directions: [hidden, now + before], orthonormal: marks of the state's own token, then of the one before it.
    projection: [hidden, now]: from a normalised embedding to its mark. One before has the first numbers of its own.
    """

    directions: torch.Tensor
    projection: torch.Tensor

    @classmethod
    def choose(cls, embedded: torch.Tensor, states: torch.Tensor, now: int, before: int, seed: int) -> Marks:
        """Chooses marks for tokens as often as in `embedded` [T, hidden], in states like `states` [T, hidden]."""
        generator = torch.Generator().manual_seed(seed)
        projection = torch.randn((embedded.shape[1], now), generator=generator)
        mean = embedded.mean(dim=0)
        projection -= torch.outer(mean, mean @ projection) / mean.dot(mean)
        projection = torch.linalg.qr(projection).Q
        return cls(_least_used(states, now + before), projection / (embedded @ projection).std(dim=0))

    @property
    def num_now(self) -> int:
        """Numbers that mark the state's own token."""
        return self.projection.shape[1]

    @property
    def num_before(self) -> int:
        """Numbers that mark the one before it."""
        return self.directions.shape[1] - self.num_now

    def without(self, states: torch.Tensor) -> torch.Tensor:
        """States, or an output head's rows, [T, hidden] with nothing where marks are."""
        return _without(states, self.directions)

    def marked(self, states: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """A conversation's states [L, hidden] with the marks of its tokens, embedded [L, hidden]."""
        now = embedded @ self.projection
        before = torch.cat([torch.zeros_like(now[:1]), now[:-1]])[:, : self.num_before]
        return self.without(states) + torch.cat([now, before], dim=1) @ self.directions.T


@dataclass(frozen=True, slots=True)
class Carried:
    """What one stream carries for heads that copy, in the directions that the target's states use least.

    directions: [hidden, n], orthonormal; made: [n, width], from a row's parts to the n numbers, each about 1: queries
    and keys as they were taught, num_looked each, then the row's token; sizes: [n], what each stands for when it is 1.
    """

    directions: torch.Tensor
    made: torch.Tensor
    sizes: torch.Tensor
    num_looked: int

    @classmethod
    def choose(cls, taught: Taught, parts: torch.Tensor, told: torch.Tensor) -> Carried:
        """Chooses for rows made of parts [T, width], whose first numbers are the token embedded. told [T, hidden]:
        the target's states before those tokens, which tell them."""
        hidden = told.shape[1]
        number, num_brought = len(taught.query), min(round(_SHARE_BROUGHT * hidden), hidden - 2 * len(taught.query))
        brought = torch.zeros(num_brought, parts.shape[1])
        brought[:, :hidden] = _most_telling(parts[:, :hidden], told, num_brought)
        made = torch.cat([taught.query, taught.key, brought])
        sizes = (parts @ made.T).square().mean(dim=0).sqrt()
        return cls(_least_used(told, len(made)), made / sizes[:, None], sizes, number)

    def without(self, states: torch.Tensor) -> torch.Tensor:
        """States [T, hidden] with nothing where the numbers are carried."""
        return _without(states, self.directions)

    def scaled(self, factor: float) -> Carried:
        """The same numbers for a stream that is read divided by `factor`."""
        sizes = self.sizes.clone()
        sizes[: 2 * self.num_looked] *= factor
        return replace(self, sizes=sizes)

    def read(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and what is brought [., hidden] from the stream."""
        rows, number = (self.directions * self.sizes).T, self.num_looked
        return rows[:number], rows[number : 2 * number], self.directions.T[2 * number :]


def _least_used(states: torch.Tensor, count: int) -> torch.Tensor:
    """[hidden, count], orthonormal: the directions in which states [T, hidden] are smallest."""
    _, vectors = torch.linalg.eigh(states.T @ states)
    return vectors[:, :count].contiguous()


def _without(states: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    return states - (states @ directions) @ directions.T


def _most_telling(embedded: torch.Tensor, told: torch.Tensor, count: int) -> torch.Tensor:
    """[count, hidden]: numbers of tokens embedded [T, hidden] that tell most of `told` (reduced-rank regression)."""
    root = whitening(embedded)
    _, _, right = torch.linalg.svd(told.T @ (embedded @ root), full_matrices=False)
    return right[:count] @ root.T


@dataclass(frozen=True, slots=True)
class Copying:
    """Matrices of heads that copy, over rows as attention reads them: queries and keys [head_dim, width].

    value: [n, width]: from a row to what is brought of it.
    """

    block: ModelConfig
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def beside(cls, block: ModelConfig, marks: Marks) -> Copying:
        """Over [embedding, state], as EAGLE-3's rows are: asks for the token of the one and that of the other."""
        hidden = block.hidden_size
        wanted = torch.zeros(marks.directions.shape[1], 2 * hidden)
        wanted[: marks.num_now, :hidden] = marks.projection.T
        wanted[marks.num_now :, hidden:] = marks.directions[:, : marks.num_before].T
        held = torch.cat([torch.zeros_like(marks.directions), marks.directions]).T
        return cls.taught(block, wanted * _SHARPNESS**0.5, held * _SHARPNESS**0.5, torch.eye(hidden, 2 * hidden))

    @classmethod
    def within(cls, block: ModelConfig, carried: Carried) -> Copying:
        """Over a stream that carries queries, keys and what is brought."""
        return cls.taught(block, *carried.read())

    @classmethod
    def taught(cls, block: ModelConfig, wanted: torch.Tensor, held: torch.Tensor, value: torch.Tensor) -> Copying:
        """Makes them of queries and keys of a few numbers, [n, width] each, whose product is the logit."""
        query, key = torch.zeros(2, block.head_dim, wanted.shape[1])
        places = slow_places(block)[: len(wanted)]
        scale = block.head_dim**0.25
        query[places], key[places] = wanted * scale, held * scale
        return cls(block, query, key, value)

    def found(self, rows: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """Numbers brought to each row of a conversation, from itself and those before it. [L, n]

        rows: [L, width]; rope: [L, 2, head_dim / 2].
        """
        query, key = (apply_rope((rows @ matrix.T)[:, None], rope)[:, 0] for matrix in (self.query, self.key))
        logits = query @ key.T * self.block.head_dim**-0.5
        later = torch.ones_like(logits, dtype=torch.bool).triu(1)
        return logits.masked_fill(later, -torch.inf).softmax(dim=-1) @ (rows @ self.value.T)

    def projections(self, brought: torch.Tensor, count: int) -> dict[str, torch.Tensor]:
        """Projections of `count` heads that add brought [hidden, n] @ what was found, as nearly as they can."""
        hidden, size = self.block.hidden_size, self.block.head_dim
        left, sizes, right = torch.linalg.svd(brought, full_matrices=False)
        rank = min(len(sizes), count * size)
        values, output = torch.zeros(count * size, self.query.shape[1]), torch.zeros(hidden, count * size)
        values[:rank] = sizes[:rank, None].sqrt() * right[:rank] @ self.value
        output[:, :rank] = left[:, :rank] * sizes[:rank].sqrt()
        return {
            "q_proj": self.query.repeat(count, 1), "k_proj": self.key.repeat(count, 1), "v_proj": values,
            "o_proj": output,
        }  # fmt: skip


def marks_beside(block: ModelConfig, embedded: torch.Tensor, states: torch.Tensor, seed: int) -> Marks:
    """The marks of `Copying.beside`; embedded, states [T, hidden] as Marks.choose has them."""
    size = len(slow_places(block))
    now = max(1, round(_SHARE_NOW * size))
    return Marks.choose(embedded, states, now, size - now, seed)


def slow_places(block: ModelConfig) -> torch.Tensor:
    """Numbers of a head that position hardly turns, int64 [n]; at least the slower half."""
    cos, sin = rope_rows(block, 2)[1]
    num_pairs = len(cos)
    count = max(int((torch.atan2(sin, cos) < _SLOW).sum()), num_pairs // 2)
    pairs = torch.arange(num_pairs - count, num_pairs)
    return torch.cat([pairs, pairs + num_pairs])
