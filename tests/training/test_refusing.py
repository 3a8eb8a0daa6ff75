"""Targets that no head is trained for, and files beside a training that were cut or kept."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import transformers

from engine.feature_spec import FeatureSpec
from outrider.errors import StartupError
from training.answers import _read
from training.args import HeadArgs
from training.card import _command
from training.target_states import TargetStates


def test_a_target_that_runs_by_other_code_is_refused(tmp_path: Path) -> None:
    """Its last norm need not be ours, and heads learn from what comes out of it."""
    config = transformers.Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, sliding_window=16,
    )  # fmt: skip
    transformers.Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(StartupError, match="is a Gemma2ForCausalLM, which runs by transformers' code"):
        TargetStates(
            tmp_path, FeatureSpec("last"), dtype="float32", device="cpu", load_format="auto", max_tokens=64, max_len=64,
            threads=1,
        )  # fmt: skip


def test_a_cards_command_keeps_settings_of_zero() -> None:
    zero = {"average_tokens": 0, "warmup_tokens": 0, "weight_decay": 0.0, "feature_loss": 0.0}
    made = HeadArgs.parse(shlex.split(_command(dict(zero), 1000))[3:])
    assert {name: getattr(made, name) for name in zero} == zero


@pytest.mark.parametrize("text", ['{"facts": {"pro', "[]", '{"answers": []}', '{"facts": {}, "answers": [[1]]}'])
def test_kept_answers_that_are_damaged_are_made_again(text: str, tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    assert _read(path, {}) is None
    path.write_text(text, encoding="utf-8")
    assert _read(path, {}) is None
