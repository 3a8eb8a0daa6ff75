"""The chunks of a stream as bytes.

A chunk differs from the one before in little more than its text, so what is around it is encoded once per request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from gateway.logprobs import ChatLogprobs, PieceOf, TextLogprobs, chat_logprobs
from gateway.message_parts import CallArguments, CallBegin, Content, Part
from gateway.responses import Usage
from gateway.schemas import SpeculativeOptions
from gateway.text_stream import Delta, Piece
from outrider.algorithms import algorithm_name
from outrider.v1 import verify_pb2

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode
_TEXT = b"\0"  # stands for a text, since JSON holds no such byte


class Extension:
    """What a stream tells beyond OpenAI's chunks, and only to who asks: where tokens came from, and the trees.

    Its place is the chunk's key `outrider`.
    """

    def __init__(self, piece_of: PieceOf, *, origins: bool, trees: bool) -> None:
        self.asked = origins or trees
        self._piece_of = piece_of
        self._origins = origins
        self._trees = trees

    def of(self, delta: Delta) -> bytes:
        """A delta's extension as JSON; empty when there is nothing to tell."""
        told: dict[str, Any] = {}
        if self._origins and (tokens := [origin_of(piece) for piece in delta.pieces or () if not piece.ends]):
            told["tokens"] = tokens
        if self._trees and delta.tree is not None:
            told["tree"] = tree_of(delta.tree, delta.step, self._piece_of)
        return _encode(told) if told else b""


def extension_of(options: SpeculativeOptions | None, piece_of: PieceOf) -> Extension:
    """What a request's `speculative` asks to be told."""
    return Extension(
        piece_of, origins=bool(options and options.include_origins), trees=bool(options and options.include_trees)
    )


def origin_of(piece: Piece) -> dict[str, Any]:
    """One token: `depth` is its place in the tree of its step, null for the target's own."""
    return {
        "id": piece.token, "text": piece.text, "origin": piece.origin, "step": piece.step,
        "depth": piece.depth or None, "drafter": algorithm_name(piece.algorithm) if piece.algorithm else None,
    }  # fmt: skip


def tree_of(tree: verify_pb2.VerifiedTree, step: int, piece_of: PieceOf) -> dict[str, Any]:
    """The tree that a step verified: nodes in the drafter's order, `parent` -1 at the root."""
    probabilities: Sequence[float | None] = tree.probabilities or [None] * len(tree.tokens)
    columns = zip(tree.tokens, tree.parents, tree.accepted, probabilities, strict=True)
    return {
        "step": step, "drafter": algorithm_name(tree.algorithm), "draft_us": tree.draft_us,
        "verify_us": tree.verify_us,
        "nodes": [
            {"id": token, "text": piece_of(token).decode(errors="replace"), "parent": parent,
             "accepted": accepted, "probability": probability}
            for token, parent, accepted, probability in columns
        ],
    }  # fmt: skip


class Chunks:
    """Writes a stream's events. Everything fixed is encoded on creation."""

    def __init__(
        self, kind: str, *, id: str, created: int, model: str, fingerprint: str | None, include_usage: bool,
        extension: Extension, current_usage: Callable[[], Usage] | None = None,
    ) -> None:  # fmt: skip
        head = {"id": id, "object": kind, "created": created, "model": model, "system_fingerprint": fingerprint}
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._no_usage = b',"usage":null' if include_usage else b""
        self._current_usage = current_usage if include_usage else None
        self._extension = extension

    def _event(self, choice: bytes, extension: bytes = b"") -> bytes:
        usage = self._no_usage if self._current_usage is None else b',"usage":' + _encode(self._current_usage())
        if not extension:
            return b"".join((self._head, choice, b"]", usage, b"}\n\n"))
        return b"".join((self._head, choice, b'],"outrider":', extension, usage, b"}\n\n"))

    def usage(self, usage: Usage) -> bytes:
        """The chunk without choices that `include_usage` asks for."""
        return b"".join((self._head, b'],"usage":', _encode(usage), b"}\n\n"))


class ChatChunks(Chunks):
    """Chunks of a chat: the role first, then what it says, then the finish reason alone."""

    def __init__(self, *, logprobs: bool, piece_of: PieceOf, **head: Any) -> None:
        super().__init__("chat.completion.chunk", **head)
        self._logprobs = logprobs
        self._piece_of = piece_of
        self._begun: set[int] = set()
        self._untold: dict[int, list[Piece]] = {}  # tokens whose log-probabilities wait for a chunk
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # of chunks with nothing but text, by choice
        self._text_only = not (logprobs or self._extension.asked or self._current_usage)

    def events(self, delta: Delta, parts: Sequence[Part], finish_reason: str | None, call_ids: Sequence[str]) -> bytes:
        """Every event that a delta makes; none for tokens whose text is held back."""
        if finish_reason is None and len(parts) == 1 and (frame := self._frames.get(delta.choice)) is not None:
            part = parts[0]
            if isinstance(part, Content):
                return frame[0] + _encode(part.text) + frame[1]
        extension = self._extension.of(delta) if self._extension.asked else b""
        if self._logprobs:
            self._untold.setdefault(delta.choice, []).extend(delta.pieces or ())
        made: list[bytes] = []
        if delta.choice not in self._begun:
            if not (parts or extension or finish_reason):
                return b""  # what it begins with is not known yet
            made.append(
                self._opening(delta.choice, isinstance(parts[0], Content) if parts else finish_reason is not None)
            )
        bodies = [_delta_of(part, call_ids) for part in parts]
        if extension and not bodies:
            bodies.append(b"{}")
        for body in bodies:
            made.append(self._event(self._choice(delta.choice, body, b"null"), extension))
            extension = b""
        if finish_reason is not None:
            made.append(self._event(self._choice(delta.choice, b"{}", _encode(finish_reason))))
        return b"".join(made)

    def _opening(self, index: int, has_text: bool) -> bytes:
        """The role; content is null, as OpenAI has it, where calls may be all there is."""
        self._begun.add(index)
        if self._text_only:
            choice = _chat_choice(index, b'{"content":%b}' % _TEXT, b"null", b"null")
            before, _, after = self._event(choice).rpartition(_TEXT)
            self._frames[index] = before, after
        content = b'""' if has_text else b"null"
        return self._event(_chat_choice(index, b'{"role":"assistant","content":%b}' % content, b"null", b"null"))

    def _choice(self, index: int, delta: bytes, finish_reason: bytes) -> bytes:
        pieces = self._untold.pop(index, None)
        logprobs: ChatLogprobs | None = None
        if pieces:
            logprobs = chat_logprobs(pieces, self._piece_of)
        return _chat_choice(index, delta, _encode(logprobs) if logprobs else b"null", finish_reason)


def _chat_choice(index: int, delta: bytes, logprobs: bytes, finish_reason: bytes) -> bytes:
    return b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (index, delta, logprobs, finish_reason)


def _delta_of(part: Part, call_ids: Sequence[str]) -> bytes:
    if isinstance(part, Content):
        return b'{"content":' + _encode(part.text) + b"}"
    if isinstance(part, CallBegin):
        function = {"name": part.name, "arguments": ""}
        call = {"index": part.index, "id": call_ids[part.index], "type": "function", "function": function}
        return _encode({"tool_calls": [call]})
    if isinstance(part, CallArguments):
        return _encode({"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]})
    return b'{"reasoning_content":' + _encode(part.text) + b"}"


class CompletionChunks(Chunks):
    """Chunks of a plain completion."""

    def __init__(self, **head: Any) -> None:
        super().__init__("text_completion", **head)

    def events(self, index: int, delta: Delta, logprobs: TextLogprobs | None) -> bytes:
        """The event of a delta; none when it neither adds anything nor ends."""
        extension = self._extension.of(delta) if self._extension.asked else b""
        if not delta.text and delta.finish_reason is None and not extension and not (logprobs and logprobs.tokens):
            return b""
        return self._event(self._choice(index, delta.text, delta.finish_reason, logprobs), extension)

    def echo(self, index: int, text: str, logprobs: TextLogprobs | None) -> bytes:
        """The prompt itself, in front of its continuation."""
        return self._event(self._choice(index, text, None, logprobs))

    @staticmethod
    def _choice(index: int, text: str, finish_reason: str | None, logprobs: TextLogprobs | None) -> bytes:
        return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (
            index, _encode(text), _encode(logprobs) if logprobs else b"null", _encode(finish_reason),
        )  # fmt: skip
