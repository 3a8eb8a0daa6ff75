"""One choice of a chat as a message: content, reasoning and calls out of its deltas, with the reason of its end."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gateway.message_parts import CallArguments, CallBegin, Content, Part, PartParser, Reasoning
from gateway.reasoning import ReasoningParser
from gateway.text_stream import Delta, Piece
from gateway.tool_parsers.scanner import is_whole
from gateway.tool_schemas import FunctionCall, ToolCall


class NamedCall:
    """The parser where one function must be called: the whole output is its arguments."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def push(self, text: str) -> Iterable[Part]:
        """The text as arguments; the call begins with the first."""
        if text and not self._begun:
            self._begun = True
            yield CallBegin(0, self._name)
        if text:
            yield CallArguments(0, text)

    def finish(self) -> Iterable[Part]:
        """Nothing is held back."""
        return ()


@dataclass(frozen=True, slots=True)
class MessageRules:
    """How the choices of one request are read. `named` calls end as OpenAI's do: with `stop`; `single`: one call."""

    make_parser: Callable[[], PartParser] | None
    make_reasoning: Callable[[PartParser | None], ReasoningParser] | None
    named: bool
    single: bool

    def message(self) -> Message:
        """A new reader of one choice."""
        inner = self.make_parser() if self.make_parser is not None else None
        return Message(self, inner, self.make_reasoning(inner) if self.make_reasoning is not None else None)


@dataclass(slots=True)
class Message:
    """One choice on its way. `feed` gives what is new; the whole is kept where `keep` is set."""

    rules: MessageRules
    inner: PartParser | None
    reasoning: ReasoningParser | None
    reasoning_tokens: int = 0
    finish_reason: str | None = None
    call_ids: list[str] = field(default_factory=list)
    last_arguments: list[str] = field(default_factory=list)  # of the last call, in pieces

    def feed(self, delta: Delta) -> list[Part]:
        """The parts that a delta makes certain; at its end, those that were held back."""
        if self.reasoning is None and self.inner is None and delta.finish_reason is None:
            return [Content(delta.text)] if delta.text else []
        made: list[Part] = []
        if self.reasoning is not None:
            made += self._reason(self.reasoning, delta)
        elif self.inner is not None:
            made += self.inner.push(delta.text)
        elif delta.text:
            made.append(Content(delta.text))
        if delta.finish_reason is not None:
            parser = self.reasoning or self.inner
            made += parser.finish() if parser is not None else ()
        if self.rules.single:
            made = [part for part in made if not (isinstance(part, CallBegin | CallArguments) and part.index)]
        for part in made:
            if isinstance(part, CallBegin):
                self.call_ids.append(f"call_{secrets.token_hex(12)}")
                self.last_arguments = []
            elif isinstance(part, CallArguments):
                self.last_arguments.append(part.text)
        if delta.finish_reason is not None:
            calls = self.call_ids and delta.finish_reason == "stop" and not self.rules.named
            # What ends an output may stand within a call, a stop string above all.
            calls = calls and is_whole("".join(self.last_arguments))
            self.finish_reason = "tool_calls" if calls else delta.finish_reason
        return made

    def _reason(self, parser: ReasoningParser, delta: Delta) -> list[Part]:
        """The parts of a delta, read token by token, so that those of the reasoning can be counted."""
        made: list[Part] = []
        for piece in delta.pieces or ():
            before = parser.inside
            made += parser.push(piece.text)
            self.reasoning_tokens += piece.token is not None and (before or parser.inside)
        return made


@dataclass(slots=True)
class Whole:
    """A choice's whole message, for an answer that is not streamed."""

    message: Message
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[str, list[str]]] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        """The next delta."""
        self.pieces += delta.pieces or ()
        for part in self.message.feed(delta):
            match part:
                case Content(text):
                    self.content.append(text)
                case Reasoning(text):
                    self.reasoning.append(text)
                case CallBegin(_, name):
                    self.calls.append((name, []))
                case CallArguments(index, text):
                    self.calls[index][1].append(text)

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls, as an answer has them."""
        return [
            ToolCall(id=id, function=FunctionCall(name=name, arguments="".join(arguments)))
            for id, (name, arguments) in zip(self.message.call_ids, self.calls, strict=True)
        ]
