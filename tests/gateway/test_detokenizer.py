"""Text in pieces against the tokenizer's own decoding of the whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    FallbackDetokenizer,
    WindowDetokenizer,
    detokenizer_factory,
)
from tests.gateway import models

BYTE_LEVEL = models.byte_level()
FALLBACK = models.byte_fallback()
METASPACE = models.metaspace()
WITH_BYTES = models.metaspace_with_bytes()
TOKENIZERS = (BYTE_LEVEL, FALLBACK, METASPACE, WITH_BYTES)
FACTORIES = {id(tokenizer): detokenizer_factory(tokenizer) for tokenizer in TOKENIZERS}
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def pieces_of(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    """What each token adds, and what is left at the end."""
    return [*map(detokenizer.push, ids), detokenizer.finish()]


def check(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool = True) -> None:
    """Joined, the pieces are the whole text; none ends within a character that the whole text has complete."""
    whole = tokenizer.decode(ids, skip_special_tokens=skip_special)
    pieces = pieces_of(FACTORIES[id(tokenizer)].make(skip_special=skip_special), ids)
    assert "".join(pieces) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("tokenizer", "kind"),
    [(BYTE_LEVEL, ByteDetokenizer), (FALLBACK, FallbackDetokenizer), (METASPACE, WindowDetokenizer)],
)
def test_each_decoder_gets_its_kind(tokenizer: Tokenizer, kind: type) -> None:
    assert isinstance(FACTORIES[id(tokenizer)].make(skip_special=True), kind)


@given(UNICODE)
def test_byte_level_text(text: str) -> None:
    check(BYTE_LEVEL, BYTE_LEVEL.encode(text, add_special_tokens=False).ids)


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 3), max_size=60), st.booleans())
def test_byte_level_ids(ids: list[int], skip_special: bool) -> None:
    check(BYTE_LEVEL, ids, skip_special=skip_special)


@given(UNICODE)
def test_byte_fallback_text(text: str) -> None:
    check(FALLBACK, FALLBACK.encode(text, add_special_tokens=False).ids)


@given(st.lists(st.integers(0, FALLBACK.get_vocab_size() + 3), max_size=60), st.booleans())
def test_byte_fallback_ids(ids: list[int], skip_special: bool) -> None:
    check(FALLBACK, ids, skip_special=skip_special)


@given(st.text("abcdefgh rownixjump東京", max_size=40))
def test_metaspace_text(text: str) -> None:
    check(METASPACE, METASPACE.encode(text, add_special_tokens=False).ids)


def bytes_of(data: bytes) -> list[int]:
    """Byte pieces."""
    return [WITH_BYTES.token_to_id(f"<0x{byte:02X}>") or 0 for byte in data]


NO_TEXT = st.binary(max_size=60) | st.text("é東💡", max_size=30).map(str.encode)
STRAY = NO_TEXT.map(lambda data: bytes_of(b"\xff" + data))  # all of a run is U+FFFD for one byte
WHOLE = st.text("é東💡", max_size=3).map(lambda text: bytes_of(text.encode()))
SILENT = st.lists(st.sampled_from([1, 2, 10**6]), max_size=40)  # hidden and unknown


@given(st.lists(STRAY | WHOLE | SILENT, max_size=8))
def test_metaspace_ids(runs: list[list[int]]) -> None:
    letter = WITH_BYTES.token_to_id("▁the") or 0
    check(WITH_BYTES, [token for run in runs for token in (*run, letter)])


@pytest.mark.parametrize("run", [bytes_of(b"\xff"), bytes_of(b"\xe6\x9d"), [2], [10**6]])
def test_what_gives_no_text_is_not_decoded_again_and_again(run: list[int]) -> None:
    sizes: list[int] = []

    def decode(ids: list[int]) -> str:
        sizes.append(len(ids))
        return WITH_BYTES.decode(ids)

    ids = [WITH_BYTES.token_to_id("▁the") or 0, *run * 500]
    pieces = pieces_of(WindowDetokenizer(decode, frozenset((2,))), ids)
    assert "".join(pieces) == WITH_BYTES.decode(ids)
    assert max(sizes) <= 33


PIECES = [*(bytes([byte]) for byte in range(256)), b"\xe6\x9d", b"\xb1\xff", b"\xff\xf0\x9f"]
RUNS = (
    st.integers(10, 18).map(lambda length: [0xFF] * length)  # about as many as are held back
    | st.text("aé東💡", max_size=4).map(lambda text: list(text.encode()))
    | st.sampled_from([[256, 257], [258, 0x92, 0xA1]])  # characters, with a stray byte in the same token
)


@pytest.mark.parametrize("byte_by_byte", [False, True])
@given(st.lists(RUNS, max_size=8))
def test_characters_after_stray_bytes(byte_by_byte: bool, runs: list[list[int]]) -> None:
    def decode(ids: list[int]) -> str:
        data = b"".join(PIECES[token] for token in ids)
        if not byte_by_byte:
            return data.decode(errors="replace")
        return re.sub("[\udc80-\udcff]", "\ufffd", data.decode(errors="surrogateescape"))

    ids = [token for run in runs for token in run]
    assert "".join(pieces_of(WindowDetokenizer(decode, frozenset()), ids)) == decode(ids)


def test_an_emoji_of_many_tokens_comes_out_in_one_piece() -> None:
    ids = BYTE_LEVEL.encode("a👩‍🚀b", add_special_tokens=False).ids
    pieces = pieces_of(FACTORIES[id(BYTE_LEVEL)].make(skip_special=True), ids)
    assert "".join(pieces) == "a👩‍🚀b"
    assert set("".join(pieces)) == {"a", "b", "👩", "\u200d", "🚀"}


def test_a_cut_character_is_told_at_the_end_only() -> None:
    ids = BYTE_LEVEL.encode("💡", add_special_tokens=False).ids[:-1]
    *before, last = pieces_of(FACTORIES[id(BYTE_LEVEL)].make(skip_special=True), ids)
    assert "".join(before) == ""
    assert last == "\ufffd"


@given(UNICODE)
def test_the_bytes_of_tokens_are_the_text(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    assert b"".join(map(FACTORIES[id(BYTE_LEVEL)].piece, ids)).decode() == text
    ids = FALLBACK.encode(text, add_special_tokens=False).ids
    spaced = text.replace("▁", " ")  # the vocabulary has one piece for both
    assert b"".join(map(FACTORIES[id(FALLBACK)].piece, ids)).decode() == (" " + spaced if text else "")


def test_marks_that_a_parser_looks_for_are_written() -> None:
    for tokenizer, mark in ((BYTE_LEVEL, "<|im_start|>"), (FALLBACK, "</s>"), (METASPACE, "</s>")):
        token = tokenizer.token_to_id(mark)
        assert token is not None
        factory = FACTORIES[id(tokenizer)]
        assert "".join(pieces_of(factory.make(skip_special=True), [token])) == ""
        kept = factory.make(skip_special=True, keep=frozenset((mark, "[ELSE]")))
        assert "".join(pieces_of(kept, [token])) == mark
        assert factory.piece(token).decode() == mark


def test_unknown_ids_are_silent() -> None:
    for tokenizer in (BYTE_LEVEL, FALLBACK):
        detokenizer = FACTORIES[id(tokenizer)].make(skip_special=True)
        assert detokenizer.push(10**6) + detokenizer.finish() == ""
        assert FACTORIES[id(tokenizer)].piece(10**6) == b""


@pytest.fixture(scope="module")
def embedded(embedded_folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(embedded_folder / "tokenizer.json"))
    FACTORIES[id(tokenizer)] = detokenizer_factory(tokenizer)
    return tokenizer


def test_embedded_model(embedded: Tokenizer) -> None:
    """The embedded model's tokenizer, over random text and random ids."""

    @given(UNICODE)
    def text_case(text: str) -> None:
        check(embedded, embedded.encode(text, add_special_tokens=False).ids)

    @given(st.lists(st.integers(0, embedded.get_vocab_size() + 3), max_size=60), st.booleans())
    def id_case(ids: list[int], skip_special: bool) -> None:
        check(embedded, ids, skip_special=skip_special)

    text_case()
    id_case()
