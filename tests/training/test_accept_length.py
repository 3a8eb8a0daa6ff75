"""Unrolled rows are what a drafter with a paged cache computes; accept length is what rounds would commit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Segment
from engine.models.heads.runner import HeadRunner
from engine.runner import ModelRunner
from tests.training.rig import head_args
from training.accept_length import Rounds, Tree, chain_rounds, tree_rounds
from training.batches import Batch
from training.export import export
from training.kinds import ALGORITHMS
from training.loop import Trainer
from training.losses import unrolled
from training.ranks import Ranks

STEPS = 3


@pytest.fixture(scope="module")
def trainers(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trainer]:
    """Untrained networks with their targets."""
    output = tmp_path_factory.mktemp("heads")
    args = {name: head_args(name, target, data, output / name) for name in ALGORITHMS}
    return {name: Trainer(args[name], Ranks(0, 1, "cpu")) for name in ALGORITHMS}


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "NEXTN"])
def test_unrolled_rows_are_those_of_a_drafter_below_each_root(algorithm: str, trainers: dict[str, Trainer]) -> None:
    trainer = trainers[algorithm]
    batch = Batch.of(trainer.dataset.examples(1, held_out=False)[:3])
    states = trainer.target(batch.conversations)
    with torch.inference_mode():
        head = trainer.network.built()
        steps = list(unrolled(trainer.kind, head, batch, states, STEPS))
        runner = HeadRunner(head, num_slots=256, max_sessions=1, attention="torch_native")
        for row in range(len(batch.tokens)):
            for root in (9, 15, 20):
                expected = drafted(runner, batch.tokens[row], states.features[row], root)
                for step, (found, want) in enumerate(zip(steps, expected, strict=True)):
                    index = int(found.rows.flatten()[: row * found.rows.shape[1] + root].sum())
                    assert found.rows[row, root], step
                    torch.testing.assert_close(found.outputs[index], want, atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "NEXTN"])
def test_rows_that_go_on_alone_are_what_they_are_among_all(algorithm: str, trainers: dict[str, Trainer]) -> None:
    trainer = trainers[algorithm]
    batch = Batch.of(trainer.dataset.examples(1, held_out=False)[:3])
    states = trainer.target(batch.conversations)
    some = torch.tensor([8, 11, 12, 19])
    with torch.inference_mode():
        head = trainer.network.built()
        every = list(unrolled(trainer.kind, head, batch, states, STEPS))
        found = list(unrolled(trainer.kind, head, batch, states, STEPS, some))
        torch.testing.assert_close(found[0].outputs, every[0].outputs)
        for few, many in zip(found[1:], every[1:], strict=True):
            assert torch.equal(few.rows, many.rows[:, some])
            wanted = many.outputs.new_zeros((*many.rows.shape, many.outputs.shape[1]))
            wanted[many.rows] = many.outputs
            torch.testing.assert_close(few.outputs, wanted[:, some][few.rows], atol=1e-5, rtol=1e-4)


def drafted(runner: HeadRunner, tokens: torch.Tensor, features: torch.Tensor, root: int) -> list[torch.Tensor]:
    """Outputs at the root and below it as a drafter has them: rows with the target's states up to it, then its own.

    What is drafted is what came, so that it can be compared.
    """
    runner.slot_table[0, : root + STEPS] = np.arange(root + STEPS)
    states, start, outputs = runner.fuse(features[: root + 1]), 0, []
    for step in range(STEPS):
        end = root + 1 + step
        ids = tokens[start + 1 : end + 1].numpy().astype(np.int32)
        found = runner.forward([Segment(0, start, ids, np.arange(start, end, dtype=np.int32))], states)
        outputs.append(found.carried[0])
        states, start = found.carried, end
    return outputs


def test_a_shallow_model_in_training_is_the_one_that_is_exported(
    trainers: dict[str, Trainer], target: Path, tmp_path: Path
) -> None:
    trainer = trainers["STANDALONE"]
    export(trainer.kind, trainer.checkpoint, tmp_path / "head", target=target)
    batch = Batch.of(trainer.dataset.examples(1, held_out=False)[:1])
    length = int(batch.lengths[0])
    model = ModelRunner.load(tmp_path / "head", dtype="float32", num_slots=64, max_sessions=1, max_len=64, threads=1)
    model.slot_table[0, :length] = np.arange(length)
    ids = batch.tokens[0].numpy().astype(np.int32)
    logits = model.forward([Segment(0, 0, ids, np.arange(length, dtype=np.int32), num_logits=length)])
    with torch.inference_mode():
        head = trainer.network.built()
        (step,) = unrolled(trainer.kind, head, batch, trainer.target(batch.conversations), 1)
        own = head.logits(step.outputs)
    rows = step.rows[0].nonzero().flatten()
    # Exported in bf16.
    torch.testing.assert_close(own, logits[rows][:, trainer.checkpoint.drafted], atol=0.4, rtol=0.1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_tree_of_one_branch_is_a_chain(algorithm: str, trainers: dict[str, Trainer]) -> None:
    trainer = trainers[algorithm]
    examples = trainer.dataset.examples(1, held_out=False)
    chain = chain_rounds(trainer.network, trainer.target, examples, num_steps=STEPS, batch_tokens=256)
    tree = tree_rounds(trainer.network, trainer.target, examples, Tree(STEPS, 1, STEPS + 1))
    assert (tree.num_rounds, tree.num_committed) == (chain.num_rounds, chain.num_committed)
    assert tree.accepted_by_step == chain.accepted_by_step
    assert chain.num_rounds > 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_wider_tree_accepts_no_less(algorithm: str, trainers: dict[str, Trainer]) -> None:
    trainer = trainers[algorithm]
    examples = trainer.dataset.examples(1, held_out=False)
    chain = tree_rounds(trainer.network, trainer.target, examples, Tree(2, 1, 3))
    tree = tree_rounds(trainer.network, trainer.target, examples, Tree(2, 6, 6 + 36 + 1))
    assert tree.accept_length >= chain.accept_length


@given(st.lists(st.integers(0, 4), min_size=2, max_size=40), st.data())
def test_rounds_commit_every_token_but_the_first(accepted: list[int], drawn: st.DataObject) -> None:
    first = drawn.draw(st.integers(0, len(accepted) - 1))
    rounds = Rounds()
    rounds.walk(accepted, first, len(accepted))
    assert rounds.num_committed == len(accepted) - 1 - first
    assert sum(rounds.accepted_by_step) == rounds.num_committed - rounds.num_rounds
    assert rounds.accepted_by_step == sorted(rounds.accepted_by_step, reverse=True)


def test_rounds_by_hand() -> None:
    rounds = Rounds()
    # Below position 2 two drafts are accepted: 3, 4 and the bonus 5; below 5 none: 6; below 6 more than there is left.
    rounds.walk([9, 9, 2, 9, 9, 0, 3, 9], 2, 8)
    assert (rounds.num_rounds, rounds.num_committed, rounds.accepted_by_step) == (3, 5, [1, 1])
    assert Rounds().accept_length == 1.0
