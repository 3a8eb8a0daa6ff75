"""Training: every kind learns, a seed repeats it, and a stopped one goes on as if it had never stopped."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.heads.load import HeadFolder
from engine.models.heads.names import OUTPUT_HEAD
from outrider.errors import StartupError, Unfinished
from tests.engine.disk import Disk
from tests.training.rig import NeverStopping, head_args, make_data, with_other_weights
from training.batches import is_held_out
from training.checkpoints import BEST, EXPORT_FOLDER, LAST, Checkpoint
from training.data.store import read_examples, shard_paths
from training.kinds import ALGORITHMS, Kind, make_kind
from training.loop import Trainer, main
from training.losses import Report
from training.ranks import Ranks
from training.writer import Writer

ALONE = Ranks(0, 1, "cpu")


class Heard(Writer):
    """Remembers reports."""

    def __init__(self) -> None:
        self.reports: list[Report] = []

    def step(self, at: Checkpoint, report: Report, tokens: int) -> None:
        self.reports.append(report)

    def evaluated(self, at: Checkpoint, figures: dict[str, float]) -> None:
        pass


def trained(*words: Any, **changes: Any) -> tuple[Checkpoint, list[Report]]:
    args = head_args(*words, **changes)
    heard = Heard()
    Trainer(args, ALONE).run(heard, NeverStopping())
    return Checkpoint.load(Path(args.output) / LAST), heard.reports


def assert_same(left: Checkpoint, right: Checkpoint) -> None:
    assert (left.seen, left.step, left.plan) == (right.seen, right.step, right.plan)
    assert left.tensors.keys() == right.tensors.keys()
    for name, tensor in left.tensors.items():
        assert torch.equal(tensor, right.tensors[name]), name


def from_noise(trainer: Trainer) -> None:
    """Forgets what fitting and the target's layers gave to begin with; an output head is the target's."""
    generator = torch.Generator().manual_seed(0)
    trainer.network.load(
        {
            name: tensor if tensor.ndim == 1 or name == OUTPUT_HEAD
            else torch.randn(tensor.shape, generator=generator) * tensor.shape[1] ** -0.5
            for name, tensor in trainer.network.trained().items()
        }
    )  # fmt: skip


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_loss_of_every_kind_falls(algorithm: str, target: Path, data: Path, tmp_path: Path) -> None:
    trainer, heard = Trainer(head_args(algorithm, target, data, tmp_path), ALONE), Heard()
    from_noise(trainer)
    trainer.run(heard, NeverStopping())
    early, late = heard.reports[:3], heard.reports[-3:]
    for step in range(1 if algorithm == "STANDALONE" else 3):
        assert sum(r.token_losses[step] for r in late) < 0.8 * sum(r.token_losses[step] for r in early)
    if algorithm == "EAGLE":
        assert sum(r.feature_losses[0] for r in late) < 0.9 * sum(r.feature_losses[0] for r in early)


def test_eagle3_learns_from_states_as_they_are(target: Path, data: Path, tmp_path: Path) -> None:
    at, reports = trained("EAGLE3", target, data, tmp_path, no_fc_norm=True)
    assert not any("fc_norm" in name for name in at.tensors)
    assert sum(r.token_losses[0] for r in reports[-3:]) < 0.95 * sum(r.token_losses[0] for r in reports[:3])
    folder = HeadFolder.open(tmp_path / "export")
    assert "fc_norm.0.weight" not in folder.config.shapes()


def test_a_seed_repeats_a_training(target: Path, data: Path, tmp_path: Path) -> None:
    first, _ = trained("EAGLE3", target, data, tmp_path / "1", tokens=1500)
    again, _ = trained("EAGLE3", target, data, tmp_path / "2", tokens=1500)
    other, _ = trained("EAGLE3", target, data, tmp_path / "3", tokens=1500, seed=1)
    assert_same(first, again)
    assert not torch.equal(first.tensors["fc.weight"], other.tensors["fc.weight"])


@pytest.mark.parametrize("algorithm", ["EAGLE", "STANDALONE"])
def test_a_stopped_training_goes_on_as_if_it_had_not_stopped(
    algorithm: str, target: Path, data: Path, tmp_path: Path
) -> None:
    # 40 conversations of 32 tokens: the second half begins in the second epoch. No warm-up and cosine over the same
    # tokens, so that both see the same learning rates.
    whole, _ = trained(algorithm, target, data, tmp_path / "whole", tokens=2400, accumulate=2)
    halted = Trainer(head_args(algorithm, target, data, tmp_path / "halves", tokens=2400, accumulate=2), ALONE)
    batches = halted.dataset.batches(halted.checkpoint.plan)
    halted._evaluate(Heard())
    while halted.checkpoint.seen < 1500:
        halted._step(batches)
    halted._save(LAST)
    rest, _ = trained(algorithm, target, data, tmp_path / "halves", tokens=2400, accumulate=2)
    assert whole.plan.epoch > 0
    assert_same(whole, rest)


def test_evaluations_come_at_the_same_tokens_however_often_a_training_is_stopped(
    target: Path, data: Path, tmp_path: Path
) -> None:
    class Ends(Heard):
        def step(self, at: Checkpoint, report: Report, tokens: int) -> None:
            stopping.asked = True

    changes = {"tokens": 1500, "eval_every": 600}
    whole, _ = trained("EAGLE", target, data, tmp_path / "whole", **changes)
    at, stopping = Checkpoint({}, {}, torch.zeros(0)), NeverStopping()
    while at.seen < 1500:
        stopping.asked = False
        Trainer(head_args("EAGLE", target, data, tmp_path / "parts", **changes), ALONE).run(Ends(), stopping)
        at = Checkpoint.load(tmp_path / "parts" / LAST)
    assert len(whole.history) > 2
    assert at.history == whole.history


def test_a_checkpoint_without_losses_is_one(target: Path, data: Path, tmp_path: Path) -> None:
    trained("EAGLE", target, data, tmp_path, tokens=300)
    values = torch.load(tmp_path / LAST, weights_only=True)
    del values["losses"]
    torch.save(values, tmp_path / LAST)
    assert trained("EAGLE", target, data, tmp_path, tokens=600)[0].seen >= 600


def test_states_may_come_from_the_disk(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh, _ = trained("EAGLE3", target, data, tmp_path / "fresh", tokens=1500)
    stored, _ = trained("EAGLE3", target, data, tmp_path / "1", tokens=1500, store_states=str(tmp_path / "states"))
    assert fresh.plan.epoch >= 2
    assert_same(fresh, stored)
    trainer = Trainer(head_args("EAGLE3", target, data, tmp_path / "2", store_states=str(tmp_path / "states")), ALONE)
    monkeypatch.setattr(trainer.target, "rows", None)
    assert trainer._step(trainer.dataset.batches(trainer.checkpoint.plan))[1] > 0
    changes = {"store_states": str(tmp_path / "states"), "quantization": "int8"}
    with pytest.raises(StartupError, match="holds states of"):
        Trainer(head_args("EAGLE", target, data, tmp_path / "3", **changes), ALONE)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_training_goes_on_from_an_exported_head(algorithm: str, target: Path, data: Path, tmp_path: Path) -> None:
    first, _ = trained(algorithm, target, data, tmp_path / "first", tokens=600)
    words = algorithm, target, data, tmp_path / "second"
    again = Trainer(head_args(*words, initial_head=str(tmp_path / "first" / "export")), ALONE).checkpoint
    assert (again.seen, again.step) == (0, 0)
    assert torch.equal(again.drafted, first.drafted)
    assert again.tensors.keys() == first.tensors.keys()
    for name, tensor in first.measured.items():
        assert torch.equal(again.tensors[name], tensor.bfloat16().float()), name


def test_a_head_of_another_shape_is_no_place_to_start_from(target: Path, data: Path, tmp_path: Path) -> None:
    trained("EAGLE3", target, data, tmp_path / "first", tokens=300)
    folder = str(tmp_path / "first" / "export")
    for changes, message in (
        ({"draft_vocab_size": 100}, "drafts 200 tokens; --draft-vocab-size is 100"),
        ({"num_kv_heads": 3}, r"q_proj.weight is \[144, 192\], EAGLE3 with these flags has \[96, 192\]"),
        ({"no_fc_norm": True}, "fc_norm.0.weight has no place in EAGLE3 with these flags"),
        ({"initial_head": "shipped"}, "no EAGLE3 head comes with Outrider for"),
    ):
        with pytest.raises(StartupError, match=message):
            Trainer(
                head_args("EAGLE3", target, data, tmp_path / "second", **({"initial_head": folder} | changes)), ALONE
            )


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("eagle_aux_hidden_state_layer_ids", [0, 1, 2], r"aux_layers is \(0, 1, 2\), EAGLE3 for this target has"),
        ("rope_theta", 77.0, "rope_theta is 77.0, EAGLE3 for this target has"),
    ],
)
def test_a_head_that_computes_otherwise_is_no_place_to_start_from(
    setting: str, value: object, message: str, target: Path, data: Path, tmp_path: Path
) -> None:
    trained("EAGLE3", target, data, tmp_path / "first", tokens=300)
    config = tmp_path / "first" / "export" / "config.json"
    settings = json.loads(config.read_text())
    settings.pop("eagle_config", None)
    settings.pop("rope_parameters", None)
    config.write_text(json.dumps(settings | {setting: value}))
    with pytest.raises(StartupError, match=message):
        Trainer(head_args("EAGLE3", target, data, tmp_path / "second", initial_head=str(config.parent)), ALONE)


def test_a_deeper_draft_model_is_not_cut(target: Path, data: Path, tmp_path: Path) -> None:
    trained("STANDALONE", target, data, tmp_path / "first", tokens=300, num_layers=3)
    words = "STANDALONE", target, data, tmp_path / "second"
    with pytest.raises(StartupError, match=r"model.layers.2.* has no place in STANDALONE with these flags"):
        Trainer(head_args(*words, num_layers=2, initial_head=str(tmp_path / "first" / "export")), ALONE)


def test_data_that_comes_while_training_is_taken_in_at_the_next_epoch(target: Path, tmp_path: Path) -> None:
    data = make_data(tmp_path / "data", target, count=12)
    trainer = Trainer(head_args("EAGLE", target, data, tmp_path / "head"), ALONE)
    plan = trainer.checkpoint.plan
    batches = trainer.dataset.batches(plan)
    next(batches)
    make_data(data, target, count=12, start=12)
    while plan.epoch == 0:
        assert plan.num_shards == 1
        next(batches)
    assert plan.num_shards == 2


def test_a_checkpoint_of_another_shape_is_refused(target: Path, data: Path, tmp_path: Path) -> None:
    trained("NEXTN", target, data, tmp_path, tokens=300)
    with pytest.raises(StartupError, match="trained with algorithm 'NEXTN', now 'EAGLE'"):
        Trainer(head_args("EAGLE", target, data, tmp_path, tokens=300), ALONE)


def test_the_command_leaves_a_head_a_history_and_a_picture(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"category": "greeting", "turns": ["Hello, world!"]}) + "\n")
    output = tmp_path / "head"
    changes = {"eval_prompts": str(prompts), "eval_answer_tokens": 12, "eval_every": 400, "tokens": 700}
    assert main(head_args("EAGLE3", target, data, output, **changes)) == 0
    rows = [json.loads(line) for line in (output / "history.jsonl").read_text().splitlines()]
    assert rows[0]["seen"] == 0
    assert rows[-1]["seen"] >= 700
    measured = {"seen", "chain", "tree", "prompts_chain", "prompts_tree"}
    assert rows[0].keys() == measured
    assert all(row.keys() == measured | {"loss"} for row in rows[1:])
    assert all(row["chain"] >= 1 for row in rows)
    assert (output / "accept_length.png").read_bytes().startswith(b"\x89PNG")
    assert (output / BEST).is_file()
    assert list((output / "tensorboard").iterdir())
    assert (output / "export" / "model.safetensors").is_file()
    assert "prompts_chain" in capsys.readouterr().out


@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_batches_may_be_smaller_than_what_a_head_begins_from(
    algorithm: str, target: Path, data: Path, tmp_path: Path
) -> None:
    trainer = Trainer(head_args(algorithm, target, data, tmp_path, batch_tokens=32, tokens=64), ALONE)
    assert all(tensor.isfinite().all() for tensor in trainer.network.parameters())


@pytest.fixture(scope="module")
def long(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of 32 tokens, some of them held out."""
    data = make_data(tmp_path_factory.mktemp("long"), target, count=180)
    examples = [example for path in shard_paths(data) for example in read_examples(path)]
    assert {is_held_out(example) for example in examples if len(example.tokens) == 32} == {True, False}
    return data


@pytest.mark.parametrize(
    ("algorithm", "unroll"), [("EAGLE3", 1), ("EAGLE3", 7), ("NEXTN", 1), ("NEXTN", 7), ("STANDALONE", 3)]
)
def test_conversations_may_be_as_long_as_they_are_cut(
    algorithm: str, unroll: int, target: Path, long: Path, tmp_path: Path
) -> None:
    changes = {"max_len": 32, "unroll": unroll, "tokens": 600, "eval_conversations": 4}
    at, reports = trained(algorithm, target, long, tmp_path, **changes)
    assert at.history[-1]["chain"] >= 1
    assert reports


def test_data_that_another_target_wrote_is_refused(target: Path, data: Path, tmp_path: Path) -> None:
    other = with_other_weights(target, tmp_path / "other")
    with pytest.raises(StartupError, match=r"holds what target [0-9a-f]{16} \(420 tokens\) wrote, not [0-9a-f]{16} "):
        Trainer(head_args("EAGLE", other, data, tmp_path / "head"), ALONE)
    with pytest.raises(StartupError, match=r"wrote, not dummy \(420 tokens\)"):
        Trainer(head_args("EAGLE", target, data, tmp_path / "head", load_format="dummy"), ALONE)


@pytest.mark.parametrize("tokens", [300, 4000])
def test_a_training_whose_loss_is_no_number_ends_and_keeps_what_there_was(
    tokens: int, target: Path, data: Path, tmp_path: Path
) -> None:
    good, _ = trained("EAGLE3", target, data, tmp_path, tokens=1)
    before = {name: (tmp_path / name).read_bytes() for name in (LAST, BEST, f"{EXPORT_FOLDER}/model.safetensors")}
    trainer = Trainer(head_args("EAGLE3", target, data, tmp_path, tokens=tokens), ALONE)
    trainer.optimizers._learning_rate = 1e30
    with pytest.raises(Unfinished, match=r"after \d[\d,]* tokens; lower --learning-rate, which is 0.01"):
        trainer.run(Heard(), NeverStopping())
    assert before == {name: (tmp_path / name).read_bytes() for name in before}
    assert_same(Checkpoint.load(tmp_path / LAST), good)


def test_a_signal_while_it_sets_up_ends_it_in_good_order(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_kind_at_last(*words: Any, **options: Any) -> Kind:
        os.kill(os.getpid(), signal.SIGTERM)
        return make_kind(*words, **options)

    with monkeypatch.context() as patch:
        patch.setattr("training.loop.make_kind", make_kind_at_last)
        assert main(head_args("EAGLE", target, data, tmp_path, tokens=600)) == 0
    assert Checkpoint.load(tmp_path / LAST).step == 0
    assert main(head_args("EAGLE", target, data, tmp_path, tokens=600)) == 0
    at = Checkpoint.load(tmp_path / LAST)
    assert at.seen >= 600
    assert at.history[0]["seen"] == 0


@pytest.mark.parametrize("output", ["/proc/x", "{}/file", "{}/file/head"])
def test_a_head_that_cannot_be_written_is_told_in_one_line(
    output: str, target: Path, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    output = output.format(tmp_path)
    with pytest.raises(StartupError, match=f"the head cannot be written to {output}"):
        Trainer(head_args("EAGLE", target, data, Path(output)), ALONE)


def test_a_checkpoint_is_on_the_disk_before_it_takes_the_others_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    Checkpoint({}, {"a": torch.ones(2)}, torch.arange(2)).save(tmp_path / LAST)
    disk.check(tmp_path / LAST)
    assert Checkpoint.load(tmp_path / LAST).tensors["a"].tolist() == [1.0, 1.0]


def test_a_damaged_checkpoint_is_told_with_what_to_do(target: Path, data: Path, tmp_path: Path) -> None:
    trained("NEXTN", target, data, tmp_path, tokens=300)
    whole = (tmp_path / LAST).read_bytes()
    rng = random.Random(0)
    for content in (b"", whole[:1000], b"\x80\x02}q\x00.", *(rng.randbytes(60) for _ in range(20))):
        (tmp_path / LAST).write_bytes(content)
        with pytest.raises(StartupError, match=f"remove it to begin anew, or put {tmp_path}/best.pt in its place"):
            Trainer(head_args("NEXTN", target, data, tmp_path), ALONE)
    values = torch.load(tmp_path / BEST, weights_only=True)
    for name, value in (("tensors", [1]), ("facts", None), ("plan", {"era": 1}), ("more", 1), ("format", 0)):
        torch.save(values | {name: value}, tmp_path / LAST)
        with pytest.raises(StartupError, match=r"parts missing or wrong|another version"):
            Checkpoint.load(tmp_path / LAST)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_smallest_batches_and_vocabularies(algorithm: str, target: Path, data: Path, tmp_path: Path) -> None:
    words = algorithm, target, data, tmp_path
    changes = {"batch_tokens": 16, "draft_vocab_size": 16, "tokens": 64}
    assert trained(*words, **changes)[0].seen >= 64
    for name in changes.keys() - {"tokens"}:
        with pytest.raises(StartupError, match=rf"--{name.replace('_', '-')} is 15; it must be at least 16"):
            head_args(*words, **{name: 15})


def test_answers_that_are_cut_off_wholly_are_told(target: Path, tmp_path: Path) -> None:
    data = make_data(tmp_path / "data", target, count=4, num_asked=20)
    with pytest.raises(StartupError, match="begins within the first 16 tokens"):
        Trainer(head_args("EAGLE3", target, data, tmp_path / "head", max_len=16), ALONE)


def test_prompts_that_no_batch_holds_are_told(target: Path, data: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"turns": ["Hello, world! " * 30]}) + "\n")
    with pytest.raises(StartupError, match="an answer to --eval-prompts ends after"):
        Trainer(head_args("EAGLE", target, data, tmp_path / "head", eval_prompts=str(prompts)), ALONE)
