"""MiMo-7B's shape: a Qwen2 with layers for multi-token prediction in the same files, which only a drafter reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from engine.models.heads.load import HeadFolder, load_head
from engine.runner import ModelRunner
from tests.engine.tiny import SHAPE, VOCAB_SIZE, sessions

PREDICTION = "model.mtp_layers.0."


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder like MiMo's, and the Qwen2 that its target is."""
    folder = tmp_path_factory.mktemp("mimo")
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**SHAPE), dtype=torch.float32).eval()
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    layer = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.0.")}
    tensors |= {name.replace("model.layers.0.", PREDICTION): torch.randn_like(layer[name]) for name in layer}
    width = SHAPE["hidden_size"]
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{PREDICTION}{name}.weight"] = torch.ones(width)
    tensors[f"{PREDICTION}input_proj.weight"] = torch.randn(width, 2 * width)
    save_file(tensors, path, {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder, model


@pytest.mark.parametrize("kernel", ["1", "0"])
def test_the_target_leaves_the_prediction_layers_alone(
    mimo: tuple[Path, Any], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = mimo
    monkeypatch.setenv("OUTRIDER_CPU_KERNEL", kernel)
    with capture_logs() as logs:
        runner = ModelRunner.load(folder, dtype="float32", num_slots=100, max_sessions=1, max_len=100)
    assert not [entry for entry in logs if entry["event"] == "tensors not used"]
    assert runner.config.is_native
    assert runner.config.architecture == "MiMoForCausalLM"
    (session,) = sessions(runner, 1)
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 60).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(runner.forward([session.segment(tokens)]), expected, atol=1e-4, rtol=0)


def test_the_head_reads_them_from_the_targets_folder(mimo: tuple[Path, Any]) -> None:
    folder, _ = mimo
    opened = HeadFolder.open(folder)
    assert opened.config.family == "mimo"
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(opened.tensor("0.eh_proj.weight"), stored[f"{PREDICTION}input_proj.weight"])
    head, features = load_head(folder, folder, max_len=32)
    assert str(features) == "last"
    assert head.num_stages == 1
