"""Penalties, bias and the minimum length, applied to one row of logits along that row's own history.

A tree node's history is the session's prompt and output followed by the tokens on the path to the node, the node's own
included, so what is verified at a node is what plain decoding would have met there. The order, in float32:

    repetition  x / r above zero, x * r below, once per token in prompt or output (Keskar et al., "CTRL", 2019, section
                4.1, with transformers' care for the sign)
    presence,   x - count * frequency - presence, for tokens in the output (OpenAI's rule)
    frequency
    bias        x + bias
    min tokens  the stop ids become -inf while the output is shorter, whatever their bias

Only the logits of tokens in the history or the lists are touched; nothing of the vocabulary's size is made. `penalise`
shapes a row on the host; `row_edits` says what it would do, for rows that lie on a device (kernels/shaping.py).
"""

import copy
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
_NO_IDS: Ids = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """What a request adds to its logits. The defaults change nothing; ids are inside the vocabulary."""

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    """Above 0."""
    bias_ids: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    """Distinct."""
    bias_values: Row = field(default_factory=lambda: np.empty(0, np.float32))
    min_tokens: int = 0
    stop_ids: Ids = field(default_factory=lambda: np.empty(0, np.int64))

    def __post_init__(self) -> None:
        if self.repetition <= 0.0:
            raise ValueError(f"repetition must be above 0, got {self.repetition}")
        if self.bias_ids.shape != self.bias_values.shape:
            raise ValueError(f"{len(self.bias_ids)} bias ids but {len(self.bias_values)} values")

    @classmethod
    def build(
        cls,
        *,
        presence: float = 0.0,
        frequency: float = 0.0,
        repetition: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        min_tokens: int = 0,
        stop_ids: Iterable[int] = (),
    ) -> "Penalties":
        """Makes penalties of plain Python values."""
        bias = logit_bias or {}
        return cls(
            presence=presence,
            frequency=frequency,
            repetition=repetition,
            bias_ids=np.fromiter(bias.keys(), np.int64, len(bias)),
            bias_values=np.fromiter(bias.values(), np.float32, len(bias)),
            min_tokens=min_tokens,
            stop_ids=np.array(sorted(set(stop_ids)), np.int64),
        )

    @property
    def uses_history(self) -> bool:
        return self.presence != 0.0 or self.frequency != 0.0 or self.repetition != 1.0

    @property
    def changes_nothing(self) -> bool:
        """Whether `penalise` would leave every row as it is, so that it need not be called."""
        return not (self.uses_history or len(self.bias_ids) or (self.min_tokens and len(self.stop_ids)))


class History:
    """The distinct tokens of a session's prompt and output, with their counts in the output.

    Grows in the order of first appearance, so a commit costs its own tokens only.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        distinct = list(dict.fromkeys(prompt))
        self._prompt_places = {token: place for place, token in enumerate(distinct)}  # copies share it
        self._new_places: dict[int, int] = {}
        self._ids = np.array(distinct, np.int64)
        self._counts = np.zeros(len(distinct), np.int64)
        self.num_output = 0
        """Output tokens so far."""

    def copy(self) -> "History":
        """The same so far; what is committed to one does not reach the other."""
        other = copy.copy(self)
        other._ids, other._counts, other._new_places = self._ids.copy(), self._counts.copy(), self._new_places.copy()
        return other

    def commit(self, tokens: Iterable[int]) -> None:
        """Add output tokens (resumed ones too)."""
        for token, count in Counter(tokens).items():
            place = self._place(token)
            if place is None:
                place = self._new_places[token] = len(self)
                if place == len(self._ids):
                    self._ids = _doubled(self._ids)
                    self._counts = _doubled(self._counts)
                self._ids[place] = token
            self._counts[place] += count
            self.num_output += count

    def __len__(self) -> int:
        return len(self._prompt_places) + len(self._new_places)

    @property
    def ids(self) -> Ids:
        """int64 [m]: distinct tokens of prompt and output."""
        return self._ids[: len(self)]

    @property
    def counts(self) -> Ids:
        """int64 [m]: how often each of `ids` is in the output."""
        return self._counts[: len(self)]

    def count(self, token: int) -> int:
        """How often `token` is in the output."""
        place = self._place(token)
        return 0 if place is None else int(self._counts[place])

    def _place(self, token: int) -> int | None:
        place = self._prompt_places.get(token)
        return self._new_places.get(token) if place is None else place


def penalise(row: Row, penalties: Penalties, history: History, path: Sequence[int] = ()) -> None:
    """Shape the logits float32 [V] of the row at the end of `path`, in place.

    `history` holds the session's tokens up to and including the tree's root, `path` those from below the root to the
    row's node, so it is empty for the root's row.
    """
    if penalties.uses_history:
        path_ids, counts = _on_path(history, path)
        # Taken from the row as it was, since the session's history reaches some of these tokens too.
        shaped = _penalised(row[path_ids], counts, penalties)
        row[history.ids] = _penalised(row[history.ids], history.counts, penalties)
        row[path_ids] = shaped
    if len(penalties.bias_ids):
        row[penalties.bias_ids] += penalties.bias_values
    if history.num_output + len(path) < penalties.min_tokens:
        row[penalties.stop_ids] = -math.inf


@dataclass(frozen=True, slots=True)
class RowEdits:
    """What `penalise` does to one row, in its order; the ids of each part are distinct."""

    ids: Ids
    """int64 [m]: tokens in the history; x becomes (x / repetition above zero, else x * repetition) - penalty."""
    penalties: Row
    """float32 [m]"""
    repetition: float
    bias_ids: Ids
    bias_values: Row
    forbidden: Ids
    """int64: tokens that become -inf."""


def row_edits(penalties: Penalties, history: History, path: Sequence[int]) -> RowEdits:
    """The changes of `penalise` with the same arguments."""
    ids, counts = _NO_IDS, _NO_IDS
    if penalties.uses_history:
        path_ids, path_counts = _on_path(history, path)
        others = ~np.isin(history.ids, path_ids)
        ids = np.concatenate([history.ids[others], path_ids])
        counts = np.concatenate([history.counts[others], path_counts])
    is_short = history.num_output + len(path) < penalties.min_tokens
    return RowEdits(
        ids, _penalty(counts, penalties), penalties.repetition, penalties.bias_ids, penalties.bias_values,
        penalties.stop_ids if is_short else _NO_IDS,
    )  # fmt: skip


def _on_path(history: History, path: Sequence[int]) -> tuple[Ids, Ids]:
    """The path's ids, each once, and how often each stands in the output and the path together."""
    on_path = Counter(path)
    ids = np.fromiter(on_path, np.int64, len(on_path))
    return ids, np.fromiter((history.count(t) + n for t, n in on_path.items()), np.int64, len(on_path))


def _penalty(counts: Ids, penalties: Penalties) -> Row:
    """float32: what presence and frequency take off, given counts in the output."""
    penalty = counts * penalties.frequency + (counts > 0) * penalties.presence
    return penalty.astype(np.float32)


def _penalised(logits: Row, counts: Ids, penalties: Penalties) -> Row:
    """The logits of tokens in the history, given their counts in the output."""
    factor = np.float32(penalties.repetition)
    shaped = np.where(logits < 0, logits * factor, logits / factor)
    return shaped - _penalty(counts, penalties)


def _doubled(array: Ids) -> Ids:
    return np.concatenate([array, np.zeros(max(16, len(array)), array.dtype)])
