"""A model folder's text files, as the gateway, draft services and training read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tokenizers import AddedToken, Tokenizer

from outrider.errors import StartupError
from outrider.text_files import find_templates, load_tokenizer, read_json, token_variables
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


def test_where_a_template_is_found(tmp_path: Path) -> None:
    assert find_templates(tmp_path) == {}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        json.dumps({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]})
    )
    assert find_templates(tmp_path) == {"default": "d", "tool_use": "t"}
    config.write_text(json.dumps({"chat_template": [5, {"name": ["default"]}, {"template": "t"}]}))
    assert find_templates(tmp_path) == {}
    config.write_text('{"chat_template": "c"}')
    assert find_templates(tmp_path) == {"default": "c"}
    (tmp_path / "chat_template.jinja").write_text("j")
    assert find_templates(tmp_path) == {"default": "j"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("u")
    assert find_templates(tmp_path) == {"default": "j", "tool_use": "u"}
    (tmp_path / "mine.jinja").write_text("m")
    assert find_templates(tmp_path, tmp_path / "mine.jinja") == {"default": "m"}
    with pytest.raises(StartupError, match=r"absent\.jinja cannot be read: "):
        find_templates(tmp_path, tmp_path / "absent.jinja")
    (tmp_path / "chat_template.jinja").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(StartupError, match=r"chat_template\.jinja is a Git LFS pointer"):
        find_templates(tmp_path)


def test_special_tokens_are_those_of_both_files(tmp_path: Path) -> None:
    assert token_variables(tmp_path) == {}
    (tmp_path / "special_tokens_map.json").write_text(
        '{"bos_token": "<a>", "eos_token": {"content": "<b>"}, "additional_special_tokens": ["x"]}'
    )
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"eos_token": "<c>", "pad_token": null, "model_max_length": 5}')
    assert token_variables(tmp_path) == {"bos_token": "<a>", "eos_token": "<c>"}
    for damaged in ("[", '{"a":' * 100_000, "\x00"):
        config.write_text(damaged)
        with pytest.raises(StartupError, match=r"tokenizer_config\.json cannot be read: "):
            token_variables(tmp_path)


def test_a_file_that_is_no_object_is_told(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert read_json(path, missing_ok=True) == {}
    with pytest.raises(StartupError, match=r"config\.json does not exist; the model needs it"):
        read_json(path)
    path.write_text("[]")
    with pytest.raises(StartupError, match=r"config\.json must hold a JSON object"):
        read_json(path)
