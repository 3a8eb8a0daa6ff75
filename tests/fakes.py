"""Stand-ins that run the true engine without weights: a toy model, its forward pass over slots, a byte tokenizer.

The runner keeps what was written into each slot. So it finds a wrong slot, mask, depth or prefix, and a page that
somebody else has used since, when it reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Segment
from engine.config import ModelConfig
from kernels.penalties import History, Penalties, penalise
from kernels.philox import COIN_LANE, uniform_one
from kernels.sampling import Filters, draw
from outrider.sampling import SamplingParams

_WORD = (1 << 64) - 1
_START = 0x243F6A8885A308D3


class WrongAttention(AssertionError):
    """A segment sees something else than its own path."""


@dataclass(frozen=True)
class ToyModel:
    """Next-token logits as a hash of the last `order` tokens; with a small order greedy decoding soon loops.

    spread: standard deviation of the logits, about; larger is more certain.
    """

    vocab_size: int = 64
    order: int = 4
    spread: float = 3.0

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """float32 [vocab_size] for the token after `tokens`."""
        return _toy_logits(self.vocab_size, self.spread, tuple(tokens[-self.order :]))

    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        """The `count` likeliest tokens after `tokens`, one after another."""
        path = list(tokens)
        for _ in range(count):
            path.append(int(self.logits(path).argmax()))
        return path[len(tokens) :]

    def decode(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int = 0,
        choice: int = 0,
        stop_ids: Sequence[int] = (),
        max_len: int,
    ) -> list[int]:
        """The output of plain decoding, one token at a time, written without the engine."""
        filters = Filters(params.temperature, params.top_k, params.top_p, params.min_p)
        penalties = Penalties.build(
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            repetition=params.repetition_penalty,
            logit_bias=params.logit_bias,
            min_tokens=params.min_tokens,
            stop_ids=stop_ids,
        )
        history = History(prompt)
        output: list[int] = []
        while len(prompt) + len(output) < max_len:
            row = self.logits([*prompt, *output]).copy()
            penalise(row, penalties, history)
            token = draw(row, filters, uniform_one(seed, choice, len(output), COIN_LANE))
            output.append(token)
            history.commit([token])
            if token in stop_ids or len(output) == params.max_tokens:
                break
        return output


@lru_cache(maxsize=65536)
def _toy_logits(vocab_size: int, spread: float, tail: tuple[int, ...]) -> NDArray[np.float32]:
    key = _START
    for token in tail:
        key = _mix_one(key, token)
    # splitmix64 (Steele, Lea, Flood, 2014) over the vocabulary.
    x = np.uint64(key) + np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    unit = (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
    logits = (spread * 3.46 * (unit - 0.5)).astype(np.float32)
    logits.setflags(write=False)
    return logits


def _mix(chain: NDArray[np.uint64], tokens: NDArray[np.int32]) -> NDArray[np.uint64]:
    x = (chain ^ (tokens.astype(np.uint64) + np.uint64(1))) * np.uint64(0xD6E8FEB86659FD93)
    return x ^ (x >> np.uint64(32))


def _mix_one(chain: int, token: int) -> int:
    x = (chain ^ (token + 1)) * 0xD6E8FEB86659FD93 & _WORD
    return x ^ (x >> 32)


def toy_config(vocab_size: int, max_position: int, eos_token_ids: tuple[int, ...] = ()) -> ModelConfig:
    """The shapes that requests are checked against; the toy has no layers."""
    return ModelConfig(
        architecture="ToyForCausalLM",
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position=max_position,
        rope_theta=1e4,
        rms_eps=1e-6,
        tied_embeddings=True,
        eos_token_ids=eos_token_ids,
    )


@dataclass(eq=False)
class FakeRunner:
    """Runs a ToyModel as engine.runner.ModelRunner runs a real one: everything it knows lies in slots.

    features: rows [num_slots, feature_width] that begin with the token and its position.
    on_forward: called first in every step, on the engine's thread.
    nan_tokens: rows of these tokens have no distribution.
    """

    model: ToyModel
    num_slots: int
    max_sessions: int
    max_len: int
    feature_width: int = 0
    eos_token_ids: tuple[int, ...] = ()
    nan_tokens: frozenset[int] = frozenset()
    on_forward: Callable[[], object] = lambda: None
    steps: int = 0
    widest: int = 0  # most rows in a segment with a tree
    dtype: torch.dtype = torch.float32
    model_path: Path = Path("/models/toy")
    numerics_id: str = "toy"
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    config: ModelConfig = field(init=False)
    slot_table: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        self.config = toy_config(self.model.vocab_size, self.max_len, self.eos_token_ids)
        self.slot_table = np.full((self.max_sessions, self.max_len), -1, np.int32)
        self._tokens = np.zeros(self.num_slots, np.int32)
        self._positions = np.full(self.num_slots, -1, np.int32)
        self._chains = np.zeros(self.num_slots, np.uint64)
        self._plane = np.zeros((self.num_slots, self.feature_width), np.float32)

    @property
    def pool(self) -> FakeRunner:
        """The runner itself, which has `move`."""
        return self

    def move(self, source: NDArray[np.int32], target: NDArray[np.int32]) -> None:
        """Copies what slots hold."""
        for plane in (self._tokens, self._positions, self._chains, self._plane):
            plane[target] = plane[source]

    @property
    def likeliest(self) -> list[int] | None:
        """None: the fake does not look for the highest logits."""
        return None

    @property
    def features(self) -> torch.Tensor | None:
        """The feature plane."""
        return torch.from_numpy(self._plane) if self.feature_width else None

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Logits float32 [sum of num_logits, vocab]."""
        self.on_forward()
        self.steps += 1
        slots = np.concatenate([segment.slots for segment in segments])
        if len(np.unique(slots)) != len(slots):
            raise WrongAttention(f"a slot is written twice in one step: {slots}")
        rows = [row for segment in segments for row in self._run(segment)]
        return torch.from_numpy(np.stack(rows) if rows else np.empty((0, self.model.vocab_size), np.float32))

    def _run(self, segment: Segment) -> list[NDArray[np.float32]]:
        chain, tail = self._prefix(segment)
        parents = _parents(segment)
        depths = np.arange(len(segment.tokens)) if segment.depths is None else segment.depths
        if segment.mask is not None:
            self.widest = max(self.widest, len(segment.tokens))
        chains, tails = [chain], [tail]
        for token, parent in zip(segment.tokens.tolist(), parents, strict=True):
            chains.append(_mix_one(chains[parent + 1], token))
            tails.append((*tails[parent + 1], token)[-self.model.order :])
        self._tokens[segment.slots] = segment.tokens
        self._positions[segment.slots] = segment.prefix_len + depths
        self._chains[segment.slots] = np.array(chains[1:], np.uint64)
        if self.feature_width:
            self._plane[segment.slots, 0] = segment.tokens
            self._plane[segment.slots, 1] = segment.prefix_len + depths
        wanted = range(len(segment.tokens) - segment.num_logits, len(segment.tokens))
        return [self._logits(int(segment.tokens[row]), tails[row + 1]) for row in wanted]

    def _prefix(self, segment: Segment) -> tuple[int, tuple[int, ...]]:
        """The content of the slots before the segment: the hash of all, and the last tokens."""
        slots = self.slot_table[segment.table_row, : segment.prefix_len]
        tokens, chains = self._tokens[slots], self._chains[slots]
        before = np.concatenate([np.array([_START], np.uint64), chains[:-1]])[: len(slots)]
        in_order = np.array_equal(self._positions[slots], np.arange(len(slots)))
        if not in_order or not np.array_equal(_mix(before, tokens), chains):
            raise WrongAttention(f"row {segment.table_row}: the prefix of {len(slots)} is not one path")
        tail = tuple(tokens[max(0, len(tokens) - self.model.order) :].tolist())
        return (int(chains[-1]) if len(chains) else _START), tail

    def _logits(self, token: int, tail: tuple[int, ...]) -> NDArray[np.float32]:
        logits = self.model.logits(tail)
        return np.full_like(logits, np.nan) if token in self.nan_tokens else logits


def _parents(segment: Segment) -> list[int]:
    """The parent of each row in the segment (-1: the prefix's last token), on which depths and mask must agree."""
    count = len(segment.tokens)
    if segment.mask is None or segment.depths is None:
        if segment.mask is not None or segment.depths is not None:
            raise WrongAttention("a mask needs depths, and depths a mask")
        return list(range(-1, count - 1))
    parents: list[int] = []
    for row in range(count):
        seen = np.flatnonzero(segment.mask[row])
        ranks = segment.depths[seen]
        order = seen[np.argsort(ranks)]
        if not np.array_equal(np.sort(ranks), np.arange(segment.depths[row] + 1)) or order[-1] != row:
            raise WrongAttention(f"row {row} at depth {segment.depths[row]} sees rows {seen} at depths {ranks}")
        parent = int(order[-2]) if len(order) > 1 else -1
        above = segment.mask[parent].copy() if parent >= 0 else np.zeros(count, np.bool_)
        above[row] = True
        if not np.array_equal(above, segment.mask[row]):
            raise WrongAttention(f"row {row} does not see what its parent {parent} sees, and itself")
        parents.append(parent)
    return parents


class ByteTokenizer:
    """UTF-8 bytes as tokens, then begin and end of text."""

    vocab_size = 258
    begin = 256
    end = 257

    def encode(self, text: str) -> list[int]:
        """`begin`, then a token per byte."""
        return [self.begin, *text.encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the bytes among `tokens`; damaged characters become U+FFFD."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")
