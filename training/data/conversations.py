"""What is asked in conversation number i, and how it is made: prompts sampled or composed, answers of the target.

Everything random about a conversation follows from (seed, its number), so data can be made again and gone on with.
The user's own have numbers below 0, by what they say: they are new to a folder whatever has been made there before.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kernels.sampling import Filters
from outrider.telemetry import get_logger
from training.chat_format import ChatFormat, Message
from training.data.completer import GREEDY, Completion, Conversation
from training.data.given import system_of
from training.data.overlap import OverlapFilter
from training.data.quality import is_sensible, normalized
from training.data.templates import Composer
from training.template_process import Refused

if TYPE_CHECKING:
    import torch

log = get_logger(__name__)

SAMPLED, COMPOSED, PASSAGE, GIVEN = "sampled", "composed", "passage", "given"
PROMPT_FILTERS: Final = (Filters(0.7, top_p=0.95), Filters(0.8, top_p=0.95), Filters(0.9, top_p=0.9))
ANSWER_FILTERS: Final = Filters(0.7)
MAX_PROMPT_TOKENS: Final = 160
ANSWER_LIMITS: Final = (96, 128, 192, 256)


@dataclass(slots=True)
class Record:
    """A finished conversation: ids, which of them the target wrote as its answers, and what it came from."""

    index: int
    source: str
    temperature: float
    tokens: list[int] = field(default_factory=list)
    answers: list[tuple[int, int]] = field(default_factory=list)
    """[start, end) of each answer within `tokens`, its end mark included."""
    key: int | None = None
    """Key of its first prompt: what two conversations that ask the same have in common."""
    states: torch.Tensor | None = None
    """The target's, of all tokens but the last, where they are kept."""

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that the target wrote."""
        return sum(end - start for start, end in self.answers)


@dataclass(frozen=True, slots=True)
class Mix:
    """The make-up of the data; shares of 1."""

    sampled: float = 0.5
    passage: float = 0.06
    greedy: float = 0.9
    more_turns: float = 0.2
    system: float = 0.06


class Script:
    """Makes conversations. `given` are the user's own, as lists of messages; each is taken once."""

    def __init__(
        self, chat: ChatFormat, composer: Composer, overlap: OverlapFilter, *, seed: int, mix: Mix | None = None,
        given: Sequence[Sequence[Message]] = (),
    ) -> None:  # fmt: skip
        self._chat = chat
        self._composer = composer
        self._overlap = overlap
        self._seed = seed
        self._mix = mix or Mix()
        self._given = {given_number(talk): talk for talk in given}
        self._told_of_refusal = False
        self._asked: set[int] = set()

    @property
    def given_numbers(self) -> list[int]:
        """The numbers of the user's own."""
        return list(self._given)

    def know(self, keys: Iterable[int]) -> None:
        """Takes the prompts with these keys as asked already."""
        self._asked.update(keys)

    def conversation(self, index: int) -> Conversation:
        """Conversation number `index`; returns a list of records, empty when its prompt was refused."""
        rng = random.Random(f"{self._seed}/{index}")
        greedy = rng.random() < self._mix.greedy
        record = Record(index, SAMPLED, 0.0 if greedy else ANSWER_FILTERS.temperature)
        messages: list[Message] = []
        if index in self._given:
            record.source, talk = GIVEN, self._given[index]
            turns = [m["content"] for m in talk if m["role"] == "user"]
            messages += system_of(talk)
            return (yield from self._talk(record, messages, turns, rng))
        kind = rng.random()
        if rng.random() < self._mix.system and self._chat.takes_system:
            messages.append({"role": "system", "content": self._composer.system(rng)})
        if kind < self._mix.sampled:
            text = yield from self._sampled_turn(messages, rng, self._composer.opener(rng))
        elif kind < self._mix.sampled + self._mix.passage:
            record.source = PASSAGE
            text = self._composer.self_written(rng)
        else:
            record.source = COMPOSED
            text = self._composer.prompt(rng)
        return (yield from self._talk(record, messages, [text], rng))

    def _talk(self, record: Record, messages: list[Message], turns: list[str], rng: random.Random) -> Conversation:
        """Answers the turns, and perhaps one more that follows from what was said."""
        if not turns or not self._may_ask(turns[0], record):
            return []
        for text in turns:
            if self._overlap.overlaps(text):
                return []
            if not (yield from self._answer(record, messages, text, rng)):
                return [record] if record.answers else []
        if record.source == PASSAGE:
            return [record, *(yield from self._about(record, messages[-1]["content"], rng))]
        if record.source != GIVEN and rng.random() < self._mix.more_turns:
            if rng.random() < 0.5:
                follow_up = self._composer.follow_up(rng)
            else:
                follow_up = yield from self._sampled_turn(messages, rng, "")
            if is_sensible(follow_up) and not self._overlap.overlaps(follow_up):
                yield from self._answer(record, messages, follow_up, rng)
        return [record]

    def _about(self, record: Record, text: str, rng: random.Random) -> Conversation:
        """A second conversation: a task on a text that the model wrote in the first."""
        kind = rng.choice(("extraction", "extraction", "summary", "summary", "translation"))
        task = self._composer.about(kind, text.strip(), rng)
        about = Record(record.index, PASSAGE, record.temperature)
        return (yield from self._talk_once(about, task, rng))

    def _talk_once(self, record: Record, text: str, rng: random.Random) -> Conversation:
        if not self._may_ask(text, record):
            return []
        yield from self._answer(record, [], text, rng)
        return [record] if record.answers else []

    def _sampled_turn(self, messages: list[Message], rng: random.Random, opener: str) -> Conversation:
        """A user's turn as the model goes on from `opener`; empty when it did not end."""
        try:
            prompt = self._chat.user_turn(messages, opener)
        except Refused as refusal:
            self._tell(refusal)
            return ""
        done = yield Completion(
            prompt, MAX_PROMPT_TOKENS, self._chat.user_stops, rng.choice(PROMPT_FILTERS), rng.getrandbits(63)
        )
        return (opener + self._chat.decode(done.tokens)).strip() if done.reason == "stop" else ""

    def _tell(self, refusal: Refused) -> None:
        if not self._told_of_refusal:
            log.warning("conversations that the chat template refuses are left out", reason=refusal.message)
        self._told_of_refusal = True

    def _may_ask(self, text: str, record: Record) -> bool:
        """Whether a first prompt is new, sensible and no benchmark's; remembers it."""
        key = prompt_key(text)
        if self._overlap.overlaps(text) or (record.source != GIVEN and not is_sensible(text)) or key in self._asked:
            return False
        self._asked.add(key)
        record.key = key
        return True

    def _answer(self, record: Record, messages: list[Message], text: str, rng: random.Random) -> Conversation:
        """Adds a turn and the target's answer; False when the context has no room for it or the template refuses it."""
        asked = [*messages, {"role": "user", "content": text}]
        try:
            prompt = self._chat.prompt(asked)
        except Refused as refusal:
            self._tell(refusal)
            return False
        if prompt[: len(record.tokens)] != record.tokens:
            return False  # the template rewrites earlier turns: they would not be what the target saw
        filters = GREEDY if record.temperature == 0 else ANSWER_FILTERS
        done = yield Completion(
            prompt, rng.choice(ANSWER_LIMITS), self._chat.stops, filters, rng.getrandbits(63), wants_states=True
        )
        if not done.tokens:
            return False
        record.tokens = [*prompt, *done.tokens]
        record.states = done.states
        record.answers.append((len(prompt), len(record.tokens)))
        messages[:] = [*asked, {"role": "assistant", "content": self._chat.decode(done.tokens)}]
        # After an answer that was cut, another turn would continue nothing.
        return done.reason == "stop"


def given_number(talk: Sequence[Message]) -> int:
    """The number of one of the user's own conversations: below 0, and another for another."""
    return -1 - int.from_bytes(hashlib.blake2b(json.dumps(list(talk)).encode(), digest_size=7).digest(), "little")


def prompt_key(text: str) -> int:
    """64 bits, equal for prompts that only differ in case, punctuation and spaces."""
    return int.from_bytes(hashlib.blake2b(normalized(text).encode(), digest_size=8).digest(), "little", signed=True)
