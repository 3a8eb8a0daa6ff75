"""Conversations on disk: numbered shards that are only ever added, each written whole or not at all.

A shard is a safetensors file:

    tokens       uint16 or uint32 [T]   all conversations, one behind another
    offsets      int64 [n + 1]          where each starts
    answers      int64 [m, 3]           (conversation in this shard, start, end within it) of what the target wrote
    sources      uint8 [n]              index in SOURCES
    temperatures float32 [n]            of the answers
    keys         int64 [k]              hashes of first prompts: what must not be asked again
    ended        int64 [e]              numbers of the conversations that ended, refused ones among them
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from engine.saving import save_arrays
from engine.whole import locked, written
from outrider.errors import StartupError, Unfinished, reason_of
from training.data.conversations import COMPOSED, GIVEN, PASSAGE, SAMPLED, Record

if TYPE_CHECKING:
    from training.state_store import StateFiles

SOURCES: Final = (SAMPLED, COMPOSED, PASSAGE, GIVEN)
META = "data.json"
MADE_WITH: Final = "made_with"
"""Key in META, which older ones lack: what `train data` was asked for, each time that it was something else."""
_FACTS: Final = {"format": int, "seed": int, "target": str, "vocab_size": int}
_TENSORS: Final = {"tokens": 1, "offsets": 1, "answers": 2, "sources": 1, "temperatures": 1, "keys": 1, "ended": 1}
"""The tensors of a shard, and how many dimensions each has."""


class Shard(NamedTuple):
    """What a shard holds, whatever its place: a hash of its conversations, and how many they are."""

    key: str
    num_tokens: int
    num_conversations: int

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> Shard:
        """Makes the Shard of a shard's tensors."""
        tokens, offsets = arrays["tokens"], arrays["offsets"]
        digest = hashlib.blake2b(tokens.tobytes() + offsets.tobytes(), digest_size=8)
        return cls(digest.hexdigest(), len(tokens), len(offsets) - 1)


class Origin(NamedTuple):
    """Where a conversation stands: the shard, its own number there, and its first token."""

    shard: Shard
    conversation: int
    first_token: int


_NOWHERE: Final = Origin(Shard("", 0, 0), 0, 0)


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation: ids int64 [n], and the spans [start, end) that the target wrote."""

    tokens: np.ndarray
    answers: tuple[tuple[int, int], ...]
    source: str
    temperature: float = 0.0
    origin: Origin = _NOWHERE


class DataFolder:
    """A folder of shards, which several processes may fill. `facts` must be those that it was begun with.

    states: takes the states of the records that have them. asked: what is kept under MADE_WITH, `tokens` in it, once
    something was made.
    """

    def __init__(
        self, folder: Path, facts: dict[str, Any], states: StateFiles | None = None,
        asked: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.folder = folder
        self._states = states
        self._asked = asked
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder / ".lock"):
                if not check_facts(folder, facts):
                    self._write_facts(facts | {MADE_WITH: []})
        except OSError as error:
            raise StartupError(f"training data cannot be kept in {folder}: {error}") from error
        self.ended: set[int] = set()
        self.keys: set[int] = set()
        self.num_answer_tokens = 0
        self._known: set[str] = set()
        self._take_in()
        self._wide = facts["vocab_size"] > 2**16
        self._records: list[Record] = []
        self._new_ended: list[int] = []

    def add(self, index: int, records: Sequence[Record]) -> None:
        """Conversation number `index` ended with these records."""
        self._records += records
        self._new_ended.append(index)
        self.ended.add(index)
        self.num_answer_tokens += sum(record.num_answer_tokens for record in records)

    @property
    def num_pending(self) -> int:
        """Tokens that no shard holds yet."""
        return sum(len(record.tokens) for record in self._records)

    def flush(self) -> None:
        """Writes what is pending as the next shard, and takes in what other processes added meanwhile.

        What they asked too is left out here. Unfinished where it cannot be written.
        """
        if not self._new_ended:
            return
        try:
            self._add_shard()
        except OSError as error:
            raise Unfinished(f"training data cannot be kept in {self.folder}: {reason_of(error)}") from error
        self._records, self._new_ended = [], []

    def _add_shard(self) -> None:
        with locked(self.folder / ".lock"):
            self._take_in()
            records = [record for record in self._records if record.key not in self.keys]
            twice = [record for record in self._records if record.key in self.keys]
            self.num_answer_tokens -= sum(record.num_answer_tokens for record in twice)
            num_before = self.num_answer_tokens - sum(record.num_answer_tokens for record in records)
            paths = shard_paths(self.folder)
            number = int(paths[-1].stem.rpartition("-")[2]) + 1 if paths else 0
            final = self.folder / f"shard-{number:05}.safetensors"
            arrays = self._arrays(records)
            with self._states_of(Shard.of(arrays), records):
                written(final, lambda path: save_arrays(arrays, path))
            self._note_call(num_before)
        self._known.add(final.name)
        self.keys.update(record.key for record in records if record.key is not None)

    @contextmanager
    def _states_of(self, shard: Shard, records: Sequence[Record]) -> Iterator[None]:
        """Keeps the states of a shard that is written within; where it cannot be, their disk is given back."""
        if self._states is None:
            yield
            return
        was_there = self._states.has_shard(shard)
        try:
            self._states.add_shard(shard, [(len(record.tokens), record.states) for record in records])
            yield
        except BaseException:
            if not was_there:
                self._states.remove_shard(shard)
            raise

    def _take_in(self) -> None:
        """Reads the shards that are new to us."""
        for path in shard_paths(self.folder):
            if path.name not in self._known:
                shard = _shard(path)
                self._known.add(path.name)
                self.ended.update(shard["ended"].tolist())
                self.keys.update(shard["keys"].tolist())
                self.num_answer_tokens += int((shard["answers"][:, 2] - shard["answers"][:, 1]).sum())

    def _arrays(self, records: Sequence[Record]) -> dict[str, np.ndarray]:
        """Arrays of a shard of records."""
        tokens = [token for record in records for token in record.tokens]
        answers = [(i, *span) for i, record in enumerate(records) for span in record.answers]
        keys = [record.key for record in records if record.key is not None]
        return {
            "tokens": np.array(tokens, np.uint32 if self._wide else np.uint16),
            "offsets": np.cumsum([0, *(len(record.tokens) for record in records)], dtype=np.int64),
            "answers": np.array(answers, np.int64).reshape(-1, 3),
            "sources": np.array([SOURCES.index(record.source) for record in records], np.uint8),
            "temperatures": np.array([record.temperature for record in records], np.float32),
            "keys": np.array(keys, np.int64),
            "ended": np.array(self._new_ended, np.int64),
        }

    def _note_call(self, num_before: int) -> None:
        """Keeps what was asked for. num_before: tokens of answers that there were before this call's first shard."""
        if self._asked is None:
            return
        facts = read_facts(self.folder)
        if MADE_WITH in facts:
            self._write_facts(facts | {MADE_WITH: _with_call(facts[MADE_WITH], self._asked, num_before)})
        self._asked = None

    def _write_facts(self, facts: dict[str, Any]) -> None:
        written(self.folder / META, lambda file: file.write_text(json.dumps(facts, indent=1), encoding="utf-8"))


def check_facts(folder: Path, facts: Mapping[str, Any]) -> bool:
    """Whether there is data in a folder, which was begun with these facts. StartupError where it was with others."""
    if not (folder / META).exists():
        return False
    found = read_facts(folder)
    for key, value in facts.items():
        if found.get(key) != value:
            raise StartupError(
                f"{folder} holds data made with {key} {found.get(key)!r}, now {value!r}; name another folder"
            )
    return True


def _with_call(calls: list[dict[str, Any]], asked: dict[str, Any], num_before: int) -> list[dict[str, Any]]:
    """One more; where only `tokens` differ from the last one's, in its place.

    One that ended early, and is followed by another, asked for what it made: else the other would make nothing.
    """
    if not calls:
        return [asked]
    *earlier, last = calls
    if last | {"tokens": 0} == asked | {"tokens": 0}:
        return [*earlier, asked | {"tokens": max(last["tokens"], asked["tokens"])}]
    return [*earlier, last | {"tokens": min(last["tokens"], max(1, num_before))}, asked]


def read_facts(folder: Path) -> dict[str, Any]:
    """The facts with which a folder's data was begun. StartupError where they are not there."""
    try:
        facts = json.loads((folder / META).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"{folder} is no folder of training data: {reason_of(error)}") from error
    if not isinstance(facts, dict) or not all(type(facts.get(name)) is kind for name, kind in _FACTS.items()):
        raise StartupError(f"{folder / META} does not say what the data was made with: {', '.join(_FACTS)}")
    calls = facts.get(MADE_WITH, [])
    if not isinstance(calls, list) or not all(
        isinstance(one, dict) and type(one.get("tokens")) is int for one in calls
    ):
        raise StartupError(f"{folder / META}: {MADE_WITH} must be a list of settings")
    return facts


def check_target(folder: Path, target: str, vocab_size: int) -> None:
    """StartupError unless a data folder was made with that target, by `target_states.target_id`."""
    facts = read_facts(folder)
    if (facts["target"], facts["vocab_size"]) != (target, vocab_size):
        raise StartupError(
            f"{folder} holds what target {facts['target']} ({facts['vocab_size']} tokens) wrote, not {target} "
            f"({vocab_size} tokens); a head is trained on what its own target writes"
        )


def shard_paths(folder: Path) -> list[Path]:
    """A folder's shards in order."""
    return sorted(folder.glob("shard-*.safetensors"))


def read_examples(path: Path) -> Iterator[Example]:
    """The conversations of a shard. StartupError when it is damaged."""
    shard = _shard(path)
    held = Shard.of(shard)
    tokens, offsets, answers = shard["tokens"], shard["offsets"], shard["answers"]
    spans: list[list[tuple[int, int]]] = [[] for _ in range(len(offsets) - 1)]
    for index, start, end in answers.tolist():
        spans[index].append((start, end))
    for i, (start, end) in enumerate(pairwise(offsets)):
        yield Example(
            tokens[start:end].astype(np.int64), tuple(spans[i]), SOURCES[shard["sources"][i]],
            float(shard["temperatures"][i]), Origin(held, i, int(start)),
        )  # fmt: skip


def _shard(path: Path) -> dict[str, np.ndarray]:
    """A shard's tensors. StartupError when one is missing, or they do not fit one another."""
    try:
        shard = load_file(path)
    except (SafetensorError, OSError) as error:
        raise StartupError(f"training data {path} cannot be read: {reason_of(error)}") from error
    for name, ndim in _TENSORS.items():
        if name not in shard or shard[name].ndim != ndim:
            raise StartupError(f"training data {path} is no shard: it has no {name} of {ndim} dimensions")
    offsets, answers, count = shard["offsets"], shard["answers"], len(shard["sources"])
    sound = (
        len(offsets) == count + 1 and offsets[0] == 0 and offsets[-1] == len(shard["tokens"])
        and (np.diff(offsets) >= 0).all() and len(shard["temperatures"]) == count
        and answers.shape[1] == 3 and ((answers >= 0) & (answers[:, :1] < count)).all()
        and (shard["sources"] < len(SOURCES)).all()
    )  # fmt: skip
    if not sound:
        raise StartupError(f"training data {path} is damaged: its parts do not fit one another")
    return shard
