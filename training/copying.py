"""Attention heads that start by copying: they look for the newest token where it stood before and bring what followed.

A target that repeats itself, or its prompt, does so by induction heads (Olsson et al., 2022). A draft head's one layer
can hold the whole of it, but is slow to find it by gradients. Row s reads token s + 1 and the state before it, which
still tells token s, and to a degree the one before that. So each row carries marks, a few numbers by which a token is
known again: a query is the mark of the row's token, a key the mark that the state holds, and the value is the row's
token, which followed the one that was sought.

Marks stand in the directions that the target's states use least.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.config import ModelConfig
from engine.models.heads.base import rope_rows
from kernels.rope import apply_rope

# Added to a layer's heads for this. They look for the same and each brings its part of the token.
NUM_COPYING = 3
# Logit of an agreement in one number of a mark.
_SHARPNESS = 0.5
# EAGLE-3: of a mark's numbers, those for the token itself; the others ask for the one before it as well.
_SHARE_NOW = 0.6
# One stream for all: numbers of the row's token, by which it is also brought, as a share of the stream.
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
        """For tokens as often as they come in `embedded` [T, hidden], in states like `states` [T, hidden]."""
        _, vectors = torch.linalg.eigh(states.T @ states)
        generator = torch.Generator().manual_seed(seed)
        projection = torch.randn((embedded.shape[1], now), generator=generator)
        mean = embedded.mean(dim=0)
        projection -= torch.outer(mean, mean @ projection) / mean.dot(mean)
        projection = torch.linalg.qr(projection).Q
        return cls(vectors[:, : now + before].contiguous(), projection / (embedded @ projection).std(dim=0))

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
        return states - (states @ self.directions) @ self.directions.T

    def marked(self, states: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """A conversation's states [L, hidden] with the marks of its tokens, embedded [L, hidden]."""
        now = embedded @ self.projection
        before = torch.cat([torch.zeros_like(now[:1]), now[:-1]])[:, : self.num_before]
        return self.without(states) + torch.cat([now, before], dim=1) @ self.directions.T


@dataclass(frozen=True, slots=True)
class Copying:
    """Of the heads that copy, over rows as attention reads them: queries and keys [head_dim, width].

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
        return cls._of(block, wanted, held, torch.eye(hidden, 2 * hidden))

    @classmethod
    def within(cls, block: ModelConfig, marks: Marks) -> Copying:
        """Over a stream that both are joined in, and that is marked like the state to come; marks are brought."""
        now, held = marks.directions.T.split([marks.num_now, marks.num_before])
        return cls._of(block, now[: marks.num_before], held, now)

    @classmethod
    def _of(cls, block: ModelConfig, wanted: torch.Tensor, held: torch.Tensor, value: torch.Tensor) -> Copying:
        query, key = torch.zeros(2, block.head_dim, wanted.shape[1])
        places = _slow_places(block)[: len(wanted)]
        scale = (_SHARPNESS * block.head_dim**0.5) ** 0.5
        query[places], key[places] = wanted * scale, held * scale
        return cls(block, query, key, value)

    def found(self, rows: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """What is brought to each row of a conversation, from itself and those before it. [L, n]

        rows: [L, width]; rope: [L, 2, head_dim / 2].
        """
        query, key = (apply_rope((rows @ matrix.T)[:, None], rope)[:, 0] for matrix in (self.query, self.key))
        logits = query @ key.T * self.block.head_dim**-0.5
        later = torch.ones_like(logits, dtype=torch.bool).triu(1)
        return logits.masked_fill(later, -torch.inf).softmax(dim=-1) @ (rows @ self.value.T)

    def projections(self, brought: torch.Tensor, count: int) -> dict[str, torch.Tensor]:
        """Of `count` heads that add brought [hidden, n] @ what was found, as nearly as they can."""
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
    """For `Copying.beside`."""
    size = len(_slow_places(block))
    now = max(1, round(_SHARE_NOW * size))
    return Marks.choose(embedded, states, now, size - now, seed)


def marks_within(block: ModelConfig, embedded: torch.Tensor, states: torch.Tensor, seed: int) -> Marks:
    """For `Copying.within`."""
    size = min(len(_slow_places(block)), block.hidden_size // 4)
    return Marks.choose(embedded, states, max(size, round(_SHARE_BROUGHT * block.hidden_size)), size, seed)


def _slow_places(block: ModelConfig) -> torch.Tensor:
    """Numbers of a head that position hardly turns; at least the slower half."""
    cos, sin = rope_rows(block, 2)[1]
    num_pairs = len(cos)
    count = max(int((torch.atan2(sin, cos) < _SLOW).sum()), num_pairs // 2)
    pairs = torch.arange(num_pairs - count, num_pairs)
    return torch.cat([pairs, pairs + num_pairs])
