"""Ids to text as they come: never half a character, nothing twice, joined exactly what decoding all at once gives.

Exact by knowing what the decoder does with each piece. Byte-level BPE (GPT-2's alphabet) is bytes through an
incremental UTF-8 decoder. Sentencepiece-style decoders write a run of byte pieces as characters only when the whole run
is valid UTF-8, so a run is held until it ends. Any other decoder is asked again over a sliding window.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

from tokenizers import Tokenizer

from gateway.decoder_rules import byte_piece, fallback_rule, is_byte_level

PieceT = TypeVar("PieceT")

_REPLACEMENT = "\ufffd"
_MAX_UNTOLD = 16  # tokens that may be of one character, which has at most four bytes, and so of no text yet
_decode_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """The text of one output, in pieces."""

    def push(self, token: int) -> str:
        """What can be said for certain now that `token` has come."""
        ...

    def finish(self) -> str:
        """What was held back, when no token follows."""
        ...


class ByteDetokenizer:
    """Detokenizes byte-level BPE: `pieces[id]` are the bytes of each token, or its text where they are whole
    characters."""

    def __init__(self, pieces: list[bytes | str]) -> None:
        self._pieces = pieces
        self._decoder = _decode_utf8("replace")
        self._cut = False  # whether a character's first bytes wait in the decoder

    def push(self, token: int) -> str:
        """The characters that are complete now."""
        piece = self._pieces[token] if token < len(self._pieces) else ""
        if isinstance(piece, str):
            if not self._cut:
                return piece
            piece = piece.encode()
        text = self._decoder.decode(piece)
        self._cut = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """A cut character, as U+FFFD."""
        return self._decoder.decode(b"", True)


def _whole(piece: bytes) -> bytes | str:
    """A piece as text, where it is whole characters."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return piece


class FallbackDetokenizer:
    """Detokenizes sentencepiece-style vocabularies: a piece is text, or one byte (int) of a run of byte pieces.

    `strip` leading spaces are dropped from the whole text.
    """

    def __init__(self, pieces: Sequence[str | int | None], strip: int) -> None:
        self._pieces = pieces
        self._run = bytearray()
        self._strip = strip

    def push(self, token: int) -> str:
        """The token's text; a run of bytes comes out when a text piece follows it."""
        piece = self._pieces[token] if token < len(self._pieces) else None
        if piece is None:
            return ""
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        return self._trim(self._end_run() + piece)

    def finish(self) -> str:
        """The last run of bytes as text."""
        return self._trim(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _trim(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                return text
            self._strip -= 1
            text = text[1:]
        return text


class WindowDetokenizer:
    """Detokenizes for any other decoder: decodes the last pieces again with each token, and says what they added.

    `hidden` ids are left out.
    """

    def __init__(self, decode: Callable[[list[int]], str], hidden: frozenset[int]) -> None:
        self._decode = decode
        self._hidden = hidden
        self._window: list[int] = []  # told already, then not yet
        self._told = 0
        self._told_text = ""

    def push(self, token: int) -> str:
        """What the token adds to the text: nothing while that ends in a character that may be incomplete."""
        if token in self._hidden:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        is_open = text.endswith(_REPLACEMENT) or len(text) <= len(self._told_text)
        if is_open and len(self._window) - self._told < _MAX_UNTOLD:
            return ""
        cut = self._cut_len(text) if is_open else 0
        if cut:
            text = self._decode(self._window[:-cut])
        added, end = text[len(self._told_text) :], len(self._window) - cut
        if is_open and (not added or self._told_text.endswith(_REPLACEMENT)):
            del self._window[self._told : end]  # a run goes on: how its next token is read depends on its beginning
            return added
        self._window = self._window[self._told :]
        self._told = end - self._told
        self._told_text = self._decode(self._window[: self._told])
        return added

    def _cut_len(self, text: str) -> int:
        """How many of the window's last tokens may be the first bytes of one character, which has four at most.

        The window's text is that of both its parts; it is not where a character is cut in two.
        """
        for count in (3, 2, 1):
            if self._decode(self._window[:-count]) + self._decode(self._window[-count:]) == text:
                return count
        return 0

    def finish(self) -> str:
        """What the last tokens add, complete or not."""
        added = self._decode(self._window)[len(self._told_text) :]
        self._window, self._told, self._told_text = [], 0, ""
        return added


NO_STRINGS: frozenset[str] = frozenset()


class DetokenizerFactory:
    """Makes detokenizers for one tokenizer. `piece(id)` is what a token stands for, as bytes.

    maker(hidden): a function that makes detokenizers which leave the ids of `hidden` out.
    """

    def __init__(
        self,
        special: Mapping[str, int],
        maker: Callable[[frozenset[int]], Callable[[], Detokenizer]],
        piece: Callable[[int], bytes],
    ) -> None:
        self.piece = piece
        self._special = special
        self._maker = maker
        self._makers: dict[frozenset[int], Callable[[], Detokenizer]] = {}

    def make(self, *, skip_special: bool, keep: frozenset[str] = NO_STRINGS) -> Detokenizer:
        """A detokenizer for one output; control tokens but those of `keep` are left out, or all written as they are."""
        shown = self._special.items() if skip_special else ()
        hidden = frozenset(token for text, token in shown if text not in keep)
        if hidden not in self._makers:  # as many as there are sets of markers, which are few
            self._makers[hidden] = self._maker(hidden)
        return self._makers[hidden]()


def detokenizer_factory(tokenizer: Tokenizer) -> DetokenizerFactory:
    """The exact kind for this tokenizer's decoder; the tables are built once, here."""
    decoder = json.loads(tokenizer.to_str())["decoder"]
    special = {added.content: token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    if is_byte_level(decoder):
        table = _table(tokenizer, byte_piece, b"")
        make = _from_table(ByteDetokenizer, [_whole(piece) for piece in table], "")
        return DetokenizerFactory(special, make, lambda token: table[token] if token < len(table) else b"")
    if (rule := fallback_rule(decoder)) is not None:
        pieces = _table(tokenizer, rule.piece, None)
        make = _from_table(lambda table: FallbackDetokenizer(table, rule.strip), pieces, None)
        return DetokenizerFactory(special, make, lambda token: _as_bytes(pieces[token]) if token < len(pieces) else b"")
    return DetokenizerFactory(special, _windows(tokenizer), lambda token: _window_piece(tokenizer, token))


def _windows(tokenizer: Tokenizer) -> Callable[[frozenset[int]], Callable[[], Detokenizer]]:
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    return lambda hidden: lambda: WindowDetokenizer(decode, hidden)


def _window_piece(tokenizer: Tokenizer, token: int) -> bytes:
    return (tokenizer.id_to_token(token) or "").replace("\u2581", " ").encode()


def _as_bytes(piece: str | int | None) -> bytes:
    if isinstance(piece, int):
        return bytes([piece])
    return (piece or "").encode()


def _table(tokenizer: Tokenizer, piece: Callable[[str], PieceT], empty: PieceT) -> list[PieceT]:
    """A piece per id; `empty` for ids that no token has, which decoding leaves out."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    table = [empty] * (max(vocab.values(), default=-1) + 1)
    for text, token in vocab.items():
        table[token] = piece(text)
    return table


def _from_table(
    kind: Callable[[list[PieceT]], Detokenizer], pieces: list[PieceT], empty: PieceT
) -> Callable[[frozenset[int]], Callable[[], Detokenizer]]:
    def maker(hidden: frozenset[int]) -> Callable[[], Detokenizer]:
        shown = [empty if token in hidden else piece for token, piece in enumerate(pieces)] if hidden else pieces
        return lambda: kind(shown)

    return maker
