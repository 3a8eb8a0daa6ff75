"""States that draft heads get of models run by transformers, and what is said where there are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.feature_spec import FeatureSpec
from engine.runner import ModelRunner
from outrider.errors import StartupError
from tests.engine.tiny import other_families, random_tokens, sessions

HIDDEN = 64
FAMILIES = other_families(96, HIDDEN)


def save(config: transformers.PretrainedConfig, folder: Path) -> Any:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


def load(folder: Path, features: str) -> ModelRunner:
    spec = FeatureSpec.parse(features)
    return ModelRunner.load(folder, dtype="float32", num_slots=64, max_sessions=2, max_len=60, features=spec)


@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.parametrize("features", ["last", "aux:0,3,6"])
def test_states_are_transformers_own_and_logits_those_asked_for(name: str, features: str, tmp_path: Path) -> None:
    model = save(FAMILIES[name], tmp_path)
    tokens = random_tokens(30, 8)
    with torch.no_grad():
        output = model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    kept = output.hidden_states[-1:] if features == "last" else [output.hidden_states[layer] for layer in (0, 3, 6)]
    runner = load(tmp_path, features)
    (session,) = sessions(runner, 1)
    segments = [session.segment(tokens[:20], 2), session.segment(tokens[20:], 0)]
    logits = [runner.forward([segment]) for segment in segments]
    torch.testing.assert_close(logits[0], output.logits[0, 18:20], atol=2e-4, rtol=0)
    assert logits[1].shape == (0, 96)
    assert runner.features is not None
    found = torch.cat([runner.features[segment.slots] for segment in segments])
    torch.testing.assert_close(found, torch.cat(list(kept), dim=-1)[0], atol=2e-4, rtol=1e-4)


def test_a_last_state_of_another_width_is_refused_as_such(tmp_path: Path) -> None:
    """OPT-350m projects its states down before its output head."""
    config = other_families(96, HIDDEN)["opt"]
    config.word_embed_proj_dim = 32
    save(config, tmp_path)
    with pytest.raises(StartupError, match=r"^OPTForCausalLM: features cannot be kept: 32 numbers a row .* of 64$"):
        load(tmp_path, "last")
    assert load(tmp_path, "aux:0,3,6").features is not None


def test_what_never_comes_to_the_output_head_is_no_fault_of_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(FAMILIES["opt"], tmp_path)
    monkeypatch.setattr(transformers.OPTForCausalLM, "get_output_embeddings", lambda _model: torch.nn.Linear(1, 1))
    with pytest.raises(StartupError, match="features cannot be kept: 0 numbers a row"):
        load(tmp_path, "last")
    monkeypatch.setattr(transformers.OPTForCausalLM, "get_output_embeddings", lambda _model: None)
    with pytest.raises(StartupError, match="features cannot be kept: its output head is not found"):
        load(tmp_path, "last")
