"""A model folder's text files, as the gateway, draft services and training read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tokenizers import AddedToken, Tokenizer

from outrider.errors import StartupError
from outrider.text_files import load_tokenizer, token_variables
from tests.gateway.models import byte_level


def test_what_a_tokenizer_has_kept_of_its_training_does_not_cut_texts(tmp_path: Path) -> None:
    tokenizer, path = byte_level(), tmp_path / "tokenizer.json"
    tokens = tokenizer.encode("The quick brown fox").ids
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(path))
    assert len(Tokenizer.from_file(str(path)).encode("The quick brown fox").ids) == 64
    assert load_tokenizer(path).encode("The quick brown fox").ids == tokens


def test_added_tokens_without_an_embedding_are_text_and_told_once(tmp_path: Path) -> None:
    tokenizer, path = byte_level(), tmp_path / "tokenizer.json"
    size, text = tokenizer.get_vocab_size(), "<|im_start|>a zebra <think>ran<|pad|>"
    whole = tokenizer.encode(text).ids
    tokenizer.add_tokens([AddedToken("zebra", special=False), AddedToken("<|pad|>", special=True)])
    tokenizer.save(str(path))
    with capture_logs() as logs:
        assert load_tokenizer(path, size).encode(text).ids == whole
    assert [(line["log_level"], line["vocab_size"], line["tokenizer_size"], line["tokens"]) for line in logs] == [
        ("warning", size, size + 2, ["zebra", "<|pad|>"])
    ]
    with capture_logs() as logs:
        assert max(load_tokenizer(path, size + 2).encode(text).ids) == size + 1
    assert logs == []


def test_a_tokenizer_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(StartupError, match=r"tokenizer\.json cannot be read: "):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_special_tokens_are_those_of_both_files() -> None:
    beside = json.loads('{"bos_token": "<a>", "eos_token": {"content": "<b>"}, "additional_special_tokens": ["x"]}')
    config = json.loads('{"eos_token": "<c>", "pad_token": null, "model_max_length": 5}')
    assert token_variables(beside, config) == {"bos_token": "<a>", "eos_token": "<c>"}
