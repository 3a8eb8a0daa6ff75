"""Weights that are quantised already, or left out of the model, in the files of models that transformers runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from engine.config import ModelConfig
from engine.runner import ModelRunner
from outrider.errors import StartupError
from tests.engine.tiny import SHAPE, VOCAB_SIZE, save_model

UP = "model.layers.1.mlp.gate_up_proj.weight"
EXPERT = "model.layers.1.mlp.experts.1.up_proj.weight"


def save(config: transformers.PretrainedConfig, folder: Path) -> Path:
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture
def phi3(tmp_path: Path) -> Path:
    return save(transformers.Phi3Config(**SHAPE, pad_token_id=0), tmp_path)


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def load(folder: Path, **options: Any) -> ModelRunner:
    return ModelRunner.load(folder, dtype="float32", num_slots=64, max_sessions=1, max_len=32, **options)


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("sign", ["quantization_config", "compression_config", "hf_quant_config.json"])
def test_either_reader_refuses_what_is_said_to_be_quantised(family: str, sign: str, tmp_path: Path) -> None:
    if family == "llama":
        save_model("llama", tmp_path)
    else:
        save(transformers.Phi3Config(**SHAPE, pad_token_id=0), tmp_path)
    if sign.endswith(".json"):
        (tmp_path / sign).write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    else:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {sign: {"quant_method": "compressed-tensors"}}))
    with pytest.raises(StartupError, match=rf"config\.json: the checkpoint is quantised \(`{sign}`\)"):
        ModelConfig.from_folder(tmp_path)


def test_a_wish_for_quantised_keys_and_values_says_nothing_of_weights(phi3: Path) -> None:
    said = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (phi3 / "hf_quant_config.json").write_text(json.dumps(said))
    assert ModelConfig.from_folder(phi3).architecture == "Phi3ForCausalLM"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("load_format", ["auto", "pt"])
def test_weights_of_8_bits_are_refused_by_name(dtype: torch.dtype, load_format: str, phi3: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{UP}_scale"] = (scale := tensors[UP].abs().max() / 127)[None]
        tensors[UP] = (tensors[UP] / scale).to(dtype)

    change(phi3, edit)
    if load_format == "pt":
        torch.save(load_file(phi3 / "model.safetensors"), phi3 / "pytorch_model.bin")
    with pytest.raises(StartupError, match=rf"{UP} is stored as \S+; BF16, F16, F32, F64 can be read"):
        load(phi3, load_format=load_format)


def test_experts_that_transformers_joins_are_refused_by_the_files_names(tmp_path: Path) -> None:
    experts: dict[str, Any] = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 48}
    folder = save(transformers.Qwen3MoeConfig(**SHAPE, **experts), tmp_path)
    change(folder, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].to(torch.float8_e4m3fn)}))
    with pytest.raises(StartupError, match=f"{EXPERT} is stored as F8_E4M3"):
        load(folder)


def test_tensors_that_are_left_out_are_warned_of_whatever_their_dtype(phi3: Path) -> None:
    extra = {"model.layers.7.extra": torch.ones(3), "model.layers.8.extra": torch.ones(3, dtype=torch.int8)}
    change(phi3, lambda tensors: tensors.update(extra))
    with capture_logs() as logs:
        assert load(phi3).backend.startswith("transformers")
    assert [(entry["count"], entry["first"]) for entry in logs if entry["event"] == "tensors not used"] == [
        (2, sorted(extra))
    ]


def test_masks_in_older_files_are_no_weights(tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=96, n_layer=3, n_head=6, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    folder = save(config, tmp_path)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):  # as in the files of the hub, which are the base model's
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for layer in range(3):
            tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.uint8).tril()

    change(folder, edit)
    with capture_logs() as logs:
        assert load(folder).backend.startswith("transformers")
    assert not [entry for entry in logs if entry["event"] == "tensors not used"]
