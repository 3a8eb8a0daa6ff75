"""What the stand-ins of `bench wire` say: a text for each session, cut into rounds before it is played.

The target's likeliest token at every position is the text's. The drafter knows the text inside a round and errs at the
round's last token, the bonus; so a tree drafted at a round's beginning is accepted up to its end, early or fresh alike.
Below an outcome that it drafts ahead of, it guesses the bonus right with the wished probability.

A session is known by its key, which fills its prompt.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.placement import Placement

VOCAB_SIZE = 1024
PROMPT_LEN = 32
AUX_LAYERS = (2, 16, 29)
NUM_TOP = 16  # tokens that a row of the drafter's names
_INSIDE, _DECOY, _BONUS = 0.97, 0.002, 0.05  # chances that the drafter gives: to the text, beside it, where it errs


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run. Times in ms; feature_width: numbers of a feature row, bf16, 0 for a drafter that reads none.

    cores: verify's and the drafter's, as `outrider serve` places them on a small machine; None: they have all.
    """

    verify_ms: float
    draft_ms: float
    accept_length: float
    hit_rate: float
    batch: int
    topk: int
    num_steps: int
    num_draft_tokens: int
    feature_width: int
    num_tokens: int
    burn: bool
    early: bool
    seed: int
    cores: tuple[int, int] | None = None
    busy_poll: bool = False

    @property
    def max_len(self) -> int:
        """Tokens of the longest session."""
        return PROMPT_LEN + self.num_tokens

    @property
    def hidden_size(self) -> int:
        """The target's: the features are three of its layers'. Llama-8B's where there are none."""
        return self.feature_width // len(AUX_LAYERS) or 4096

    def to_json(self) -> str:
        """The setting as JSON, for a process's command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Setting:
        """Reads what `to_json` made."""
        fields = json.loads(text)
        cores = fields.pop("cores")
        return cls(**fields, cores=None if cores is None else tuple(cores))

    def placement(self, part: int) -> Placement:
        """The placement of verify, part 0, or of the drafter, part 1."""
        return Placement(None if self.cores is None else self.cores[part])

    @cached_property
    def round_lengths(self) -> NDArray[np.float64]:
        """Chances of rounds of 1, 2, ... num_steps + 1 tokens: each draft is accepted with the same chance."""
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            mean = float(np.sum(middle ** np.arange(self.num_steps + 1)))
            low, high = (middle, high) if mean < self.accept_length else (low, middle)
        reached = low ** np.arange(self.num_steps + 1)
        return np.append(reached[:-1] - reached[1:], reached[-1])


class Text:
    """One session's text by position. tokens: int32 [n]; ends: bool [n], the last token of a round.

    top_tokens: int64 [n, NUM_TOP] and top_chances: float32 [n, NUM_TOP], what the drafter expects at a position.
    """

    def __init__(self, setting: Setting, key: int) -> None:
        rng = np.random.default_rng((setting.seed, key))
        count, half = setting.max_len + 2 * setting.num_steps + 4, VOCAB_SIZE // 2
        self.tokens = rng.integers(0, half, count).astype(np.int32)
        self.ends = np.zeros(count, np.bool_)
        # The first token of the output comes from the prompt: rounds begin after it.
        chances = setting.round_lengths / setting.round_lengths.sum()
        lengths = rng.choice(np.arange(1, setting.num_steps + 2), count, p=chances)
        last = PROMPT_LEN + np.cumsum(lengths)
        self.ends[last[last < count]] = True
        whole = np.zeros(count, np.bool_)  # ends of rounds whose drafts are all accepted
        whole[last[(last < count) & (lengths == setting.num_steps + 1)]] = True
        guessed = rng.random(count) < setting.hit_rate

        self.top_tokens = half + (rng.integers(0, half, count)[:, None] + np.arange(NUM_TOP)) % half
        # A bonus is guessed below the children that a tree offers there: behind them, or first where there are none.
        place = np.where(self.ends & ~whole, setting.topk, 0)
        known = ~self.ends | guessed
        self.top_tokens[known, place[known]] = self.tokens[known]
        falling = 1.0 - 0.001 * np.arange(NUM_TOP)
        inside = np.where(np.arange(NUM_TOP) == 0, _INSIDE, _DECOY * falling)
        bonus = np.where(np.arange(NUM_TOP) < setting.topk, _BONUS * falling, _DECOY * falling)
        self.top_chances = np.where((self.ends & ~whole)[:, None], bonus, inside).astype(np.float32)


class Script:
    """The texts of all sessions, made when they are first asked for."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._texts: dict[int, Text] = {}

    def text(self, key: int) -> Text:
        """A session's text."""
        if key not in self._texts:
            self._texts[key] = Text(self._setting, key)
        return self._texts[key]

    def tips(self, keys: list[int], positions: list[int], num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The drafter's chances float32 and tokens int64, [n, num_top] each, at positions of sessions."""
        rows = [(self.text(key), pos) for key, pos in zip(keys, positions, strict=True)]
        chances = np.stack([text.top_chances[pos, :num_top] for text, pos in rows])
        tokens = np.stack([text.top_tokens[pos, :num_top] for text, pos in rows])
        return torch.from_numpy(chances), torch.from_numpy(tokens)
