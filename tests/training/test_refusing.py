"""Targets that no head is trained for, and files beside a training that were cut or kept."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import transformers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engine.feature_spec import FeatureSpec
from engine.runner import ModelRunner
from outrider.errors import StartupError
from tests.gateway.models import byte_level, write_folder
from tests.training.rig import VOCAB_SIZE, head_args, with_other_weights
from training import evaluate
from training.answers import _read, greedy_answers
from training.args import DataArgs, EvalArgs, HeadArgs
from training.card import _command
from training.checkpoints import Checkpoint
from training.data import build
from training.loop import Trainer
from training.losses import Report
from training.ranks import Ranks
from training.target_states import TargetStates
from training.writer import Writer


class AskedAgain(Exception):
    """Raised where the target would answer."""


def asked_again(*_: Any, **__: Any) -> NoReturn:
    raise AskedAgain


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A target that runs by transformers' code."""
    config = transformers.Gemma2Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=256, sliding_window=16,
    )  # fmt: skip
    transformers.Gemma2ForCausalLM(config).save_pretrained(tmp_path / "foreign")
    return write_folder(tmp_path / "foreign", byte_level())


def test_a_target_that_runs_by_other_code_is_refused(
    foreign: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last norm need not be ours, and heads learn from what comes out of it. Nothing is begun before."""
    monkeypatch.setattr(ModelRunner, "load", None)
    settings: dict[str, Any] = {"model_path": str(foreign), "device": "cpu"}
    made = DataArgs(**settings, output=str(tmp_path / "data"))
    for refuses in (
        lambda: TargetStates(
            foreign, FeatureSpec("last"), dtype="float32", device="cpu", load_format="auto", max_tokens=64, max_len=64,
            threads=1,
        ),
        lambda: Trainer(head_args("EAGLE3", foreign, data, tmp_path / "head"), Ranks(0, 1, "cpu")),
        lambda: evaluate.main(EvalArgs(**settings, head=str(data))),
        lambda: build.main(made),
    ):  # fmt: skip
        with pytest.raises(StartupError, match="is a Gemma2ForCausalLM, which runs by transformers' code"):
            refuses()
    assert not (tmp_path / "head").exists()


def test_missing_data_leaves_no_folder_behind(target: Path, tmp_path: Path) -> None:
    args = head_args("EAGLE3", target, tmp_path / "none", tmp_path / "head")
    with pytest.raises(StartupError, match="holds no training data"):
        Trainer(args, Ranks(0, 1, "cpu"))
    assert not (tmp_path / "head").exists()


def test_other_data_and_wrong_prompts_are_told_before_the_target_is_loaded(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, prompts = with_other_weights(target, tmp_path / "other"), tmp_path / "prompts.jsonl"
    prompts.write_text('{"messages": [{"role": "user"}]}\n')
    monkeypatch.setattr(ModelRunner, "load", asked_again)
    monkeypatch.setattr(TargetStates, "__init__", asked_again)
    states, head, ranks = tmp_path / "states", tmp_path / "head", Ranks(0, 1, "cpu")
    made = DataArgs(model_path=str(other), device="cpu", output=str(data), store_states=str(states))
    with pytest.raises(StartupError, match="holds data made with "):
        build.main(made)
    with pytest.raises(StartupError, match=r"holds what target .* wrote"):
        Trainer(head_args("EAGLE3", other, data, head), ranks)
    with pytest.raises(StartupError, match=r"line 1: messages\[0\] has no content"):
        Trainer(head_args("EAGLE3", target, data, head, eval_prompts=str(prompts)), ranks)
    assert not states.exists()
    assert not head.exists()


def test_a_cards_command_keeps_settings_of_zero() -> None:
    zero = {"algorithm": "EAGLE", "average_tokens": 0, "warmup_tokens": 0, "weight_decay": 0.0, "feature_loss": 0.0}
    made = HeadArgs.parse(shlex.split(_command(dict(zero), 1000))[3:])
    assert {name: getattr(made, name) for name in zero} == zero


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--algorithm EAGLE --no-fc-norm", "--no-fc-norm is for EAGLE3; --algorithm is EAGLE"),
        ("--algorithm NEXTN --train-output-head", "--train-output-head is for EAGLE3; --algorithm is NEXTN"),
        ("--algorithm EAGLE3 --num-layers 9", "--num-layers is for STANDALONE; --algorithm is EAGLE3"),
        ("--algorithm EAGLE3 --feature-loss 9", "--feature-loss is for EAGLE; --algorithm is EAGLE3"),
        ("--algorithm STANDALONE --unroll 9", "--unroll is for EAGLE, EAGLE3, NEXTN; --algorithm is STANDALONE"),
        ("--algorithm STANDALONE --unroll-every 7", "--unroll-every is for EAGLE, EAGLE3, NEXTN; "),
        ("--algorithm STANDALONE --num-kv-heads 3", "--num-kv-heads is for EAGLE, EAGLE3, NEXTN; "),
        ("--optimizer adamw --weight-decay 0.5", "--weight-decay is for --optimizer muon; it is adamw"),
    ],
)
def test_settings_that_a_training_would_not_read_are_refused(words: str, message: str) -> None:
    with pytest.raises(StartupError, match=f"^{message}"):
        HeadArgs.parse(["--data=data", "--output=head", *words.split()])


@pytest.mark.parametrize("text", ['{"facts": {"pro', "[]", '{"answers": []}', '{"facts": {}, "answers": [[1]]}'])
def test_kept_answers_that_are_damaged_are_made_again(text: str, tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    assert _read(path, {}) is None
    path.write_text(text, encoding="utf-8")
    assert _read(path, {}) is None


def test_answers_are_kept_for_one_target_and_dtype(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, kept, own = tmp_path / "prompts.jsonl", tmp_path / "answers.json", tmp_path / "target"
    prompts.write_text(json.dumps({"category": "writing", "turns": ["Hello"]}) + "\n")
    shutil.copytree(target, own)

    def answer(dtype: str) -> None:
        greedy_answers(
            prompts, own, dtype=dtype, device="cpu", load_format="auto", threads=1, answer_tokens=4, kept=kept
        )

    answer("float32")
    assert [path.name for path in tmp_path.glob("answers*")] == ["answers.json"]
    monkeypatch.setattr(ModelRunner, "load", asked_again)
    answer("float32")
    with pytest.raises(AskedAgain):
        answer("bfloat16")
    shutil.rmtree(own)
    with_other_weights(target, own)
    with pytest.raises(AskedAgain):
        answer("float32")


def test_curves_stay_where_training_goes_on(tmp_path: Path) -> None:
    """Points stand at tokens, of which there are more than steps; those past the checkpoint are taken back."""
    at = Checkpoint({}, {}, torch.zeros(0))
    report = Report(torch.tensor(0.0), [1.0], [0.5], [])
    for cut in (50_000, 30_000):
        writer = Writer(tmp_path, at.seen)
        while at.seen < cut:
            at.step, at.seen = at.step + 10, at.seen + 10_000
            writer.step(at, report, 10_000)
        at.step, at.seen = 20, 20_000
    shown = EventAccumulator(str(tmp_path / "tensorboard"))
    shown.Reload()
    assert [point.step for point in shown.Scalars("token_loss/step_0")] == [10_000, 20_000, 30_000]


def test_more_threads_than_a_process_can_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--threads is 1025; it must be at most 1024"):
        EvalArgs(head=str(tmp_path), threads=1025)


@pytest.mark.parametrize(
    "changes",
    [
        {"tree_tokens": 1}, {"tree_tokens": -5}, {"tree_tokens": 70}, {"tree_topk": 1, "tree_tokens": 8},
        {"tree_steps": 1, "tree_tokens": 6},
    ],
)  # fmt: skip
def test_trees_that_cannot_be_are_refused_before_the_target_answers(tmp_path: Path, changes: dict[str, int]) -> None:
    with pytest.raises(StartupError, match=f"--tree-tokens is {changes['tree_tokens']}; .* from 2 to "):
        EvalArgs(head=str(tmp_path), **changes)  # pyright: ignore[reportArgumentType]


def test_trees_have_as_many_nodes_as_there_can_be_up_to_eight(tmp_path: Path) -> None:
    def tree(**changes: Any) -> tuple[int, int, int]:
        return EvalArgs(head=str(tmp_path), **changes).tree

    assert tree() == (5, 4, 8)
    assert tree(tree_topk=1) == (5, 1, 6)
    assert tree(tree_steps=1) == (1, 4, 5)
    assert tree(tree_steps=1, tree_topk=1) == (1, 1, 2)
    assert tree(tree_topk=1, tree_tokens=0) == (5, 1, 0)
    assert tree(tree_tokens=69) == (5, 4, 69)
