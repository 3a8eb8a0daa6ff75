"""Identities: equal for equal things only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models

from engine.execution import Execution
from engine.fingerprint import SAMPLE_BYTES, config_facts, numerics_id, torch_facts
from outrider.errors import StartupError
from outrider.text_files import vocab_fingerprint


def save(folder: Path, vocab: dict[str, int], specials: list[str] | None = None) -> Path:
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer.add_special_tokens(specials or [])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_vocab_fingerprint(tmp_path: Path) -> None:
    one = vocab_fingerprint(save(tmp_path / "1", {"a": 0, "b": 1}))
    same = vocab_fingerprint(save(tmp_path / "2", {"b": 1, "a": 0}))
    swapped = vocab_fingerprint(save(tmp_path / "3", {"b": 0, "a": 1}))
    longer = vocab_fingerprint(save(tmp_path / "4", {"a": 0, "b": 1}, ["<s>"]))
    assert one == same
    assert len({one, swapped, longer}) == 3
    assert len(one) == 64


def test_no_tokenizer_no_fingerprint(tmp_path: Path) -> None:
    assert vocab_fingerprint(tmp_path) == ""
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartupError, match="tokenizer"):
        vocab_fingerprint(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "no\nnumber"}))
    with pytest.raises(StartupError, match="cannot be read: Unknown tokenizer version 'no number'"):
        vocab_fingerprint(tmp_path)


def test_numerics_id(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(bytes(100))
    base = numerics_id([path], "bfloat16", "", "torch")
    assert base == numerics_id([path], "bfloat16", "", "torch")
    assert base != numerics_id([path], "float32", "", "torch")
    assert base != numerics_id([path], "bfloat16", "torch")
    path.write_bytes(bytes(99) + b"x")
    assert base != numerics_id([path], "bfloat16", "", "torch")
    assert len(base) == 16


def test_gpus_compute_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")

    def facts(name: str, capability: tuple[int, int]) -> str:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return " ".join(torch_facts(Execution(), None, gpu, torch.bfloat16))

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("kernels.dispatch.version", lambda name: "3.6.0")
    one, other = facts("NVIDIA H200", (9, 0)), facts("NVIDIA L4", (8, 9))
    assert all(word in one for word in ("NVIDIA H200 9.0", "triton 3.6.0", "torch.bfloat16"))
    assert torch.backends.cpu.get_cpu_capability() not in one
    assert len({numerics_id([], each) for each in (one, other, facts("NVIDIA L4", (8, 6)))}) == 3
    old = facts("Tesla T4", (7, 5))
    assert "triton" not in old
    assert "torch_native" in old


def test_numerics_id_sees_both_ends_of_large_files(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    ids = set()
    for place in (0, 20 * SAMPLE_BYTES - 1):
        data = bytearray(20 * SAMPLE_BYTES)
        data[place] = 1
        path.write_bytes(data)
        ids.add(numerics_id([path], "x"))
    assert len(ids) == 2


def test_what_config_says_counts_but_for_names(tmp_path: Path) -> None:
    def facts(**said: object) -> str:
        (tmp_path / "config.json").write_text(json.dumps(said))
        return config_facts(tmp_path)

    base = facts(rope_theta=1e4, _name_or_path="here")
    assert base == facts(_name_or_path="there", rope_theta=1e4)
    assert base != facts(rope_theta=1e6)
