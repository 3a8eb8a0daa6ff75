"""States on disk: what making data kept is what training would compute, for every kind of head."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.feature_spec import FeatureSpec
from engine.runner import ModelRunner
from outrider.errors import Unfinished
from tests.engine.disk import FULL, full_disk
from tests.training.rig import MAX_LEN, VOCAB_SIZE, head_args, make_data, make_runner
from training.batches import Batch
from training.data import store
from training.data.completer import Completer, Completion, Conversation
from training.data.conversations import COMPOSED, Record
from training.data.store import DataFolder, Origin, Shard
from training.loop import Trainer
from training.ranks import Ranks
from training.state_store import StateFiles, stored_layers
from training.target_states import target_id

ALONE = Ranks(0, 1, "cpu")


def two_turns(index: int, *, keeps: bool) -> Conversation:
    record = Record(index, COMPOSED, 0.0, [3, 4, 5], key=index)
    for _ in range(2):
        prompt = [*record.tokens, 40 + index, 50]
        done = yield Completion(prompt, 6 + index, frozenset({2}), cuts_loops=False, wants_states=keeps)
        record.tokens, record.states = [*prompt, *done.tokens], done.states
        record.answers.append((len(prompt), len(record.tokens)))
    return index, record


@pytest.fixture
def made(target: Path, tmp_path: Path) -> Path:
    """A folder `data` of conversations, every third without states, and their states in `states`."""
    layers = (1, 2, 3)
    runner = ModelRunner.load(
        target, dtype="float32", num_slots=4 * MAX_LEN, max_sessions=3, max_len=MAX_LEN, threads=1,
        features=FeatureSpec("aux", layers),
    )  # fmt: skip
    assert stored_layers(runner.config.num_layers) == layers
    data = tmp_path / "data"
    facts = {"format": 1, "seed": 0, "target": target_id(target, "auto"), "vocab_size": VOCAB_SIZE}
    folder = DataFolder(data, facts, StateFiles(tmp_path / "states", runner, layers))
    talks = (two_turns(index, keeps=index % 3 > 0) for index in range(12))
    for index, record in Completer(runner, shared=[3, 4]).run(talks):
        folder.add(index, [record])
    folder.flush()
    return tmp_path


@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE", "STANDALONE"])
def test_what_data_kept_is_what_training_would_compute(algorithm: str, target: Path, made: Path) -> None:
    check_states(algorithm, target, made)


def check_states(algorithm: str, target: Path, made: Path) -> None:
    kept = Trainer(head_args(algorithm, target, made / "data", made / "1", store_states=str(made / "states")), ALONE)
    fresh = Trainer(head_args(algorithm, target, made / "data", made / "2"), ALONE)
    assert kept.store is not None
    for example in kept.dataset.examples(1, held_out=False):
        batch = Batch.of([example])
        found, wanted = kept.store(batch), fresh.target(batch.conversations)
        for part, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(part[:, :-1], other[:, :-1], atol=1e-4, rtol=1e-4)


def test_states_of_other_data_that_had_the_same_place_are_not_taken(target: Path, made: Path) -> None:
    check_states("NEXTN", target, made)  # which keeps all
    shutil.rmtree(made / "data")
    make_data(made / "data", target, count=12, answer_tokens=4, num_asked=4)
    check_states("NEXTN", target, made)


def test_fewer_rows_of_a_conversation_leave_the_others_that_are_there(target: Path, tmp_path: Path) -> None:
    runner = make_runner(target)
    files, shard = StateFiles(tmp_path, runner, (3,)), Shard("0" * 16, 6, 1)
    files.make_shard(shard)
    origin, rows = Origin(shard, 0, 0), torch.rand(5, runner.config.hidden_size)
    files.write(origin, rows)
    files.write(origin, rows[:3])
    assert files.has(origin, 5)
    assert files.read(origin, 5).equal(rows)


def test_a_full_disk_is_told_and_what_was_kept_stays(target: Path, tmp_path: Path) -> None:
    runner = make_runner(target)
    files, shard = StateFiles(tmp_path, runner, (3,)), Shard("0" * 16, 10, 2)
    files.make_shard(shard)
    first, second, rows = Origin(shard, 0, 0), Origin(shard, 1, 5), torch.rand(5, runner.config.hidden_size)
    files.write(first, rows)
    told = f"states cannot be written to {tmp_path}.*: .*{FULL}"
    with full_disk(rows.nbytes + 10):
        with pytest.raises(Unfinished, match=told):
            files.write(second, rows)
        with pytest.raises(Unfinished, match=told):
            files.add_shard(Shard("1" * 16, 10, 1), [(10, torch.cat([rows, rows]))])
    assert files.has(first, 5)
    assert files.read(first, 5).equal(rows)
    assert not files.has(second, 1)
    assert len(list(tmp_path.iterdir())) == 3
    files.write(second, rows)
    assert files.read(second, 5).equal(rows)


def test_states_of_a_shard_that_cannot_be_written_give_their_disk_back(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(target)
    facts = {"format": 1, "seed": 0, "target": target_id(target, "auto"), "vocab_size": VOCAB_SIZE}
    states = tmp_path / "states"
    folder = DataFolder(tmp_path / "data", facts, StateFiles(states, runner, (3,)))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    record = Record(0, COMPOSED, 0.0, [3, 4, 5, 6], key=1)
    record.answers.append((2, 4))
    folder.add(0, [record])
    with monkeypatch.context() as patch:
        patch.setattr(store, "save_arrays", full)
        with pytest.raises(Unfinished, match="No space left"):
            folder.flush()
    assert [path.name for path in states.iterdir()] == ["states.json"]
    folder.flush()
    assert len(list(states.iterdir())) == 3


def test_a_kept_conversation_is_not_computed_again(target: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(head_args("NEXTN", target, made / "data", made / "1", store_states=str(made / "states")), ALONE)
    computed: list[int] = []
    rows = trainer.target.rows

    def counted(conversations: list[np.ndarray]) -> torch.Tensor:
        computed.extend(int(tokens[3]) - 40 for tokens in conversations)
        return rows(conversations)

    monkeypatch.setattr(trainer.target, "rows", counted)
    assert trainer.store is not None
    for _ in range(2):
        for example in trainer.dataset.examples(1, held_out=False):
            trainer.store(Batch.of([example]))
    assert all(index % 3 == 0 for index in computed)
    assert len(computed) == len(set(computed))


def test_a_folder_that_two_begin_at_once_is_never_seen_half_written(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ModelRunner.load(
        target, dtype="float32", num_slots=MAX_LEN, max_sessions=1, max_len=MAX_LEN, threads=1,
        features=FeatureSpec("aux", (3,)),
    )  # fmt: skip
    write = Path.write_text

    def begun_meanwhile(path: Path, text: str, **options: Any) -> int:
        monkeypatch.setattr(Path, "write_text", write)
        path.touch()  # as a file is while it is written
        StateFiles(tmp_path / "states", runner, (3,))
        return write(path, text, **options)

    monkeypatch.setattr(Path, "write_text", begun_meanwhile)
    StateFiles(tmp_path / "states", runner, (3,))
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["states.json"]
