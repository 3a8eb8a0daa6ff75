"""Log-probabilities as each API writes them. Verify's are natural logarithms under the shaped distribution.

A token's text is what its bytes decode to; one that is part of a character shows U+FFFD where its `bytes` are told too,
and has these for its text in a plain completion, as OpenAI writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import Struct

from gateway.answer import Answer
from gateway.offload import LOGPROB_COST
from gateway.text_stream import Piece
from outrider.v1 import verify_pb2

LEAST = -9999.0  # what OpenAI writes for a token that cannot come; JSON has no infinity
PieceOf = Callable[[int], bytes]


class TopLogprob(Struct):
    """One alternative at a position of a chat."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    """One token of a chat, and its likeliest alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """`choices[].logprobs` of a chat."""

    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(Struct):
    """`choices[].logprobs` of a plain completion: four lists of equal length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


def logprobs_cost(answer: Answer, num_top: int) -> int:
    """What `offload` takes it to cost to write the log-probabilities of a whole answer, those of its prompt too."""
    num_tokens = sum(choice.completion_tokens + len(choice.prompt_logprobs) for choice in answer.choices)
    return LOGPROB_COST * num_tokens * (1 + num_top)


def told(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, LEAST)


def chat_logprobs(pieces: Iterable[Piece], piece_of: PieceOf) -> ChatLogprobs:
    """The log-probabilities of a chunk, or of a whole message; what ended the output is no part of that."""
    found = (piece.logprob for piece in pieces if piece.logprob is not None and not piece.ends)
    return ChatLogprobs([_of_token(logprob, piece_of) for logprob in found])


def _of_token(logprob: verify_pb2.TokenLogprob, piece_of: PieceOf) -> TokenLogprob:
    data = piece_of(logprob.token)
    top = [_alternative(piece_of(item.token), item.logprob) for item in logprob.top]
    return TokenLogprob(_text(data), told(logprob.logprob), list(data), top)


def _alternative(data: bytes, logprob: float) -> TopLogprob:
    return TopLogprob(_text(data), told(logprob), list(data))


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _exact_text(data: bytes) -> str:
    """A text that no other token has."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@dataclass(slots=True)
class TextScores:
    """Collects a completion's log-probabilities; offsets go on from chunk to chunk, the echoed prompt first."""

    piece_of: PieceOf
    num_top: int
    offset: int = 0
    _made: TextLogprobs = field(default_factory=lambda: TextLogprobs([], [], [], []))

    def copy(self) -> TextScores:
        """Another one, with what was added here since the last time."""
        made = self._made
        top = None if made.top_logprobs is None else made.top_logprobs[:]
        return replace(self, _made=TextLogprobs(made.tokens[:], made.token_logprobs[:], top, made.text_offset[:]))

    def add_prompt(self, logprobs: Sequence[verify_pb2.TokenLogprob], lengths: Sequence[int]) -> None:
        """Adds the prompt's tokens, for `echo`, with the characters that each has of the echoed text."""
        for logprob, length in zip(logprobs, lengths, strict=True):
            self._add(logprob, length)

    def add(self, pieces: Iterable[Piece]) -> None:
        """Adds tokens of the output, those that end it included: without text, where the text ends."""
        for piece in pieces:
            if piece.logprob is None:
                self.offset += len(piece.text)
            else:
                self._add(piece.logprob, len(piece.text))

    def _add(self, logprob: verify_pb2.TokenLogprob, length: int) -> None:
        made, known = self._made, logprob.HasField("logprob")
        made.tokens.append(self._text(logprob.token))
        made.token_logprobs.append(told(logprob.logprob) if known else None)
        assert made.top_logprobs is not None
        made.top_logprobs.append(self._top(logprob) if known else None)
        made.text_offset.append(self.offset)
        self.offset += length

    def _top(self, logprob: verify_pb2.TokenLogprob) -> dict[str, float]:
        made: dict[str, float] = {}
        for item in logprob.top:  # likeliest first, which counts where two tokens have one text
            made.setdefault(self._text(item.token), told(item.logprob))
        made.setdefault(self._text(logprob.token), told(logprob.logprob))  # however unlikely it was
        return made

    def _text(self, token: int) -> str:
        return _exact_text(self.piece_of(token))

    def take(self) -> TextLogprobs:
        """What was added since the last time; alternatives are null where none were asked for."""
        made, self._made = self._made, TextLogprobs([], [], [], [])
        if not self.num_top:
            made.top_logprobs = None
        return made


# ---- SGLang's lists


def sglang_entries(logprobs: Sequence[verify_pb2.TokenLogprob], piece_of: PieceOf | None) -> list[list[Any]]:
    """`[logprob, id, text]` a token; text is null unless `piece_of` is given."""
    return [_entry(item.logprob if item.HasField("logprob") else None, item.token, piece_of) for item in logprobs]


def sglang_top(logprobs: Sequence[verify_pb2.TokenLogprob], piece_of: PieceOf | None) -> list[list[list[Any]] | None]:
    """The alternatives of each token, likeliest first; null for a prompt's first token."""
    return [
        [_entry(top.logprob, top.token, piece_of) for top in item.top] if item.HasField("logprob") else None
        for item in logprobs
    ]


def _entry(logprob: float | None, token: int, piece_of: PieceOf | None) -> list[Any]:
    text = _text(piece_of(token)) if piece_of is not None else None
    return [None if logprob is None else told(logprob), token, text]
