"""Draft models of targets whose layers differ: each keeps its own layer's window, in training as where it is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.models.heads.base import Vocabulary
from engine.runner import ModelRunner
from engine.saving import save_tensors
from kernels.linear import Linear
from tests.engine.tiny import SHAPE, VOCAB_SIZE
from training.batches import Batch
from training.data.store import Example
from training.export import published
from training.kinds import STANDALONE, Kind, make_kind
from training.losses import unrolled
from training.target_states import States

LENGTH, WINDOW, STEPS = 24, 5, 8
SIX: dict[str, Any] = SHAPE | {"num_hidden_layers": 6}
WINDOWED: dict[str, Any] = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 4}
EVERYWHERE: dict[str, Any] = WINDOWED | {"max_window_layers": 0}
FULL, SLIDING = "full_attention", "sliding_attention"


def made(folder: Path, config: transformers.PretrainedConfig, **written: Any) -> Path:
    """A random target, whose config.json says `written` too; None: not."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text()) | written
    (folder / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return folder


def exported(kind: Kind, target: Path, folder: Path) -> dict[str, torch.Tensor]:
    """A draft model of random weights, in `folder`; returns what is trained of it."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1)).bfloat16().float()
        for name, shape in kind.shapes(VOCAB_SIZE).items()
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(kind.values))
    stored = published(kind, tensors, torch.arange(VOCAB_SIZE), target=target)
    save_tensors(stored, folder / "model.safetensors")
    return stored


@pytest.mark.parametrize(
    ("config", "written", "num_layers", "said"),
    [
        (transformers.Qwen2Config(**SIX), {}, 1, {"layer_types": [FULL], "max_window_layers": 1}),
        (transformers.Qwen3Config(**SIX, **WINDOWED), {}, 2, {"layer_types": [FULL, SLIDING], "max_window_layers": 1}),
        (
            transformers.Qwen3Config(**SIX, **WINDOWED), {"layer_types": None}, 5,
            {"layer_types": [FULL] * 3 + [SLIDING] * 2, "max_window_layers": 3},
        ),
        (
            transformers.Qwen2Config(**SIX, **EVERYWHERE), {}, 3,
            {"layer_types": [SLIDING] * 3, "max_window_layers": 0},
        ),
        (transformers.MistralConfig(**SIX, sliding_window=WINDOW), {}, 3, {}),
    ],
    ids=["none", "deeper", "copying", "all", "mistral"],
)  # fmt: skip
def test_a_draft_model_sees_what_its_export_says(
    config: transformers.PretrainedConfig, written: dict[str, Any], num_layers: int, said: dict[str, Any],
    tmp_path: Path,
) -> None:  # fmt: skip
    target, folder = made(tmp_path / "target", config, **written), tmp_path / "draft"
    kind = make_kind(STANDALONE, target, draft_vocab_size=VOCAB_SIZE, num_kv_heads=None, num_layers=num_layers)
    assert {key: kind.values[key] for key in ("layer_types", "max_window_layers") if key in kind.values} == said
    stored = {name: tensor.float() for name, tensor in exported(kind, target, folder).items()}
    assert ModelRunner.load(folder, dtype="float32", num_slots=64, max_sessions=1, max_len=64, threads=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.randint(3, VOCAB_SIZE, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    batch = Batch.of([Example(tokens[0].numpy(), ((1, LENGTH),), "")])
    vocabulary = Vocabulary(stored["model.embed_tokens.weight"], stored["lm_head.weight"])
    with torch.inference_mode():
        wanted = model(tokens).logits[0]
        head = kind.config.build(stored, vocabulary, LENGTH + STEPS, Linear)
        # Drafts are what came, so every branch ends in the rows of the whole conversation.
        for depth, step in enumerate(unrolled(kind, head, batch, States(tokens, tokens), STEPS)):
            rows = step.rows[0].nonzero()[:, 0] + depth
            torch.testing.assert_close(head.logits(step.outputs), wanted[rows], atol=2e-3, rtol=2e-3)


def test_an_export_does_not_name_the_targets_own_weights(tmp_path: Path) -> None:
    target = made(tmp_path / "target", transformers.Qwen2Config(**SIX), transformers_weights="mine.safetensors")
    (target / "model.safetensors").rename(target / "mine.safetensors")
    kind = make_kind(STANDALONE, target, draft_vocab_size=VOCAB_SIZE, num_kv_heads=None, num_layers=2)
    exported(kind, target, tmp_path / "draft")
    assert ModelRunner.load(tmp_path / "draft", dtype="float32", num_slots=64, max_sessions=1, max_len=64, threads=1)
