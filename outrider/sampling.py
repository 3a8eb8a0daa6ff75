"""What a request asks of the target's distribution: checked once, at the edge."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.errors import InvalidArgument
from outrider.v1 import common_pb2
from outrider.wire import INT31_MAX

MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
_UINT32 = 2**32 - 1
# A logit divided by it is still a number.
_LEAST_REPETITION_PENALTY = 1e-30


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Shape and end of the output. Refuses nonsense on creation with InvalidArgument that names the field."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None  # None: as many as the context holds
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_k", self.top_k, 0, INT31_MAX)
        _in_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _in_range("seed", self.seed, 0, 2**64 - 1)
        if self.max_tokens is not None:
            _in_range("max_tokens", self.max_tokens, 1, _UINT32)  # the context cuts it
        _in_range("min_tokens", self.min_tokens, 0, INT31_MAX)
        _in_range("number of stop_token_ids", len(self.stop_token_ids), 0, MAX_STOP_TOKEN_IDS)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("repetition_penalty", self.repetition_penalty, _LEAST_REPETITION_PENALTY, 2.0)
        _in_range("number of entries in logit_bias", len(self.logit_bias), 0, MAX_LOGIT_BIAS)
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:  # NaN too; a name for each entry takes longer than all other checks
                _in_range(f"logit_bias[{token}]", bias, -100.0, 100.0)

    def check_vocab(self, vocab_size: int) -> None:
        """InvalidArgument for an id outside [0, vocab_size)."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise InvalidArgument(f"{name}: token id {token} is not from 0 to {vocab_size - 1}", field=name)

    @classmethod
    def from_proto(cls, pb: common_pb2.SamplingParams, *, vocab_size: int) -> SamplingParams:
        """The parameters from the wire; absent fields take their defaults."""
        given = {name: getattr(pb, name) for name in _OPTIONAL if pb.HasField(name)}
        params = cls(
            **given,
            stop_token_ids=tuple(pb.stop_token_ids),
            ignore_eos=pb.ignore_eos,
            logit_bias=dict(pb.logit_bias),
        )
        params.check_vocab(vocab_size)
        return params

    def to_proto(self) -> common_pb2.SamplingParams:
        """The parameters for the wire."""
        pb = common_pb2.SamplingParams(
            stop_token_ids=self.stop_token_ids, ignore_eos=self.ignore_eos, logit_bias=self.logit_bias
        )
        for name in _OPTIONAL:
            value = getattr(self, name)
            if value is not None:
                setattr(pb, name, value)
        return pb


_OPTIONAL = (
    "temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "min_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip


def _in_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not math.isfinite(value) or value > high or value < low or (open_low and value == low):
        above = "above" if open_low else "from"
        raise InvalidArgument(f"{name} is {value}; it must be {above} {low} to {high}", field=name.split()[-1])
