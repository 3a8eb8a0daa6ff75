"""Answers to prompts: streams of deltas for all choices, alone or several together, and their counts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gateway.account import Account
from gateway.merge import merge
from gateway.text_stream import ChoiceText, Delta, OutputRules, Piece
from gateway.totals import Totals
from outrider.errors import OutriderError
from outrider.speculation_count import SpeculationCount, total_speculation
from outrider.v1 import verify_pb2

# Fields of the client's that hold them.
_SCHEMAS = ("tools", "response_format", "text.format", "structured_outputs.json")
# Where in a grammar a schema or a regex does not compile, and the lines about there; the last may be cut short.
_OF_GRAMMAR = re.compile(
    r"(?<=: )at \d+\(\d+\): (?:failed to compile JSON schema: |(?=invalid regex))|\n *\d+ \| .*", re.DOTALL
)
_ONE_OF = (
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"  # llguidance
)
_ONE_OF_TOLD = (
    "It cannot be told whether a value matches two branches of a oneOf; give each a required property of its own const,"
    " or use anyOf."
)


class Answer:
    """All choices of one prompt: iterate `deltas` once, read the counts afterwards or on the way."""

    def __init__(
        self,
        responses: AsyncGenerator[verify_pb2.GenerateResponse],
        rules: OutputRules,
        *,
        num_choices: int,
        prompt_len: int,
        totals: Totals,
        account: Account,
        fields: Mapping[str, str],
        ended: set[int],
    ) -> None:
        """`totals` are of the whole request. `fields` are the body's names for the wire's, for verify's complaints.
        `ended` is told of choices that a stop string ended, so that whoever makes `responses` ends their calls."""
        self.prompt_len = prompt_len
        self.totals = totals
        self.choices = [ChoiceText(index, rules, totals) for index in range(num_choices)]
        self._responses = responses
        self._account = account
        self._fields = fields
        self._ended = ended

    async def deltas(self) -> AsyncGenerator[Delta]:
        """Deltas as they come, empty ones left out. Closing it ends the calls."""
        running = len(self.choices)
        entry = self._account.begin(self.prompt_len)
        try:
            async with contextlib.aclosing(self._responses) as responses:
                async for response in responses:
                    choice = self.choices[response.choice_index]
                    if choice.finished:
                        continue  # a stop string ended it, and this was on its way
                    delta = choice.feed(response)
                    entry.add(delta)
                    if choice.finished:
                        self._ended.add(choice.choice)
                    if delta.tokens or delta.finish_reason is not None:
                        yield delta
                    running -= choice.finished
                    if not running:
                        return
        except OutriderError as error:
            entry.failed()
            field, error.field = error.field, self._fields.get(error.field or "", error.field)
            if field == "sampling.grammar":  # which the client sent under another name
                error.message = f"{error.field}: {error.message.partition(': ')[2] or error.message}"
                _tell_of_its_own(error)
            elif field and error.message.startswith(field):
                error.message = f"{error.field}{error.message.removeprefix(field)}"
            raise
        finally:
            entry.end(self.completion_tokens, self.cached_tokens, self.speculation, complete=not running)

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices, those past a stop string left out."""
        return sum(choice.completion_tokens for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return self.choices[0].cached_tokens

    @property
    def fingerprint(self) -> str | None:
        """OpenAI's system_fingerprint, of whoever computed it: equal ones give equal output for equal seeds."""
        numerics_id = next((choice.numerics_id for choice in self.choices if choice.numerics_id), "")
        return f"fp_{numerics_id[:16]}" if numerics_id else None

    @property
    def speculation(self) -> SpeculationCount:
        """All choices' counts together."""
        return total_speculation(choice.speculation for choice in self.choices)


def _tell_of_its_own(error: OutriderError) -> None:
    """Puts verify's complaint in words of the client's, who wrote a schema or a regex and no grammar around it."""
    if error.code == "invalid_grammar" and (error.field in _SCHEMAS or (error.field or "").endswith("regex")):
        error.message = _OF_GRAMMAR.sub("", error.message)
        if error.field in _SCHEMAS:
            error.code = "invalid_json_schema"
    error.message = error.message.replace(_ONE_OF, _ONE_OF_TOLD)


async def numbered(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, Delta]]:
    """Deltas of several answers as they come, each with its answer's index."""

    async def one(index: int, answer: Answer) -> AsyncGenerator[tuple[int, Delta]]:
        async with contextlib.aclosing(answer.deltas()) as deltas:
            async for delta in deltas:
                yield index, delta

    streams = [one(index, answer) for index, answer in enumerate(answers)]
    async with contextlib.aclosing(streams[0] if len(streams) == 1 else merge(streams)) as merged:
        async for item in merged:
            yield item


@dataclass(slots=True)
class Collected:
    """A choice's whole output, for an answer that is not streamed."""

    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] = "stop"
    matched: str | int | None = None

    @property
    def text(self) -> str:
        """The text."""
        return "".join(self.texts)

    def add(self, delta: Delta) -> None:
        """The next delta."""
        self.texts.append(delta.text)
        self.tokens += delta.tokens
        self.pieces += delta.pieces or ()
        if delta.finish_reason is not None:
            self.finish_reason, self.matched = delta.finish_reason, delta.matched


async def collect(answers: Sequence[Answer]) -> list[list[Collected]]:
    """All choices of all answers, read to their ends."""
    collected = [[Collected() for _ in answer.choices] for answer in answers]
    async with contextlib.aclosing(numbered(answers)) as deltas:
        async for index, delta in deltas:
            collected[index][delta.choice].add(delta)
    return collected
