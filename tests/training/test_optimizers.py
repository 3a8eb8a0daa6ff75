"""Muon by blocks, and the running mean of parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training.rig import head_args
from training.averages import Averages
from training.checkpoints import LAST, Checkpoint
from training.export import kind_of, published
from training.loop import Trainer
from training.muon import Muon, blocks_of, orthogonalized
from training.ranks import Ranks


@pytest.mark.parametrize("shape", [(3, 8, 20), (2, 12, 12), (2, 30, 7)])
def test_blocks_become_nearly_orthogonal(shape: tuple[int, ...]) -> None:
    blocks = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = orthogonalized(blocks)
    assert found.shape == shape
    sizes = torch.linalg.svdvals(found)
    assert float(sizes.min()) > 0.4
    assert float(sizes.max()) < 1.3


def test_a_head_is_a_block_of_its_own() -> None:
    generator = torch.Generator().manual_seed(2)
    named = [
        (name, torch.nn.Parameter(torch.randn(shape, generator=generator)))
        for name, shape in (("0/q_proj/weight", (8, 6)), ("0/o_proj/weight", (6, 8)), ("0/down_proj/weight", (6, 8)))
    ]
    muon = Muon(named, lr=1.0, weight_decay=0.0, head_dim=4)
    before = [parameter.detach().clone() for _, parameter in named]
    for _, parameter in named:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    muon.step()
    for (_, parameter), old, by_rows, size in zip(named, before, (True, False, False), (4, 4, 8), strict=True):
        assert parameter.grad is not None
        wanted = orthogonalized(blocks_of(parameter.grad, by_rows, size))
        moved = blocks_of(old - parameter.detach(), by_rows, size)
        torch.testing.assert_close(moved, 0.2 * max(wanted.shape[1:]) ** 0.5 * wanted, atol=0.05, rtol=0)


def test_a_mean_is_over_the_last_tokens(target: Path, data: Path, tmp_path: Path) -> None:
    trainer = Trainer(head_args("NEXTN", target, data, tmp_path), Ranks(0, 1, "cpu"))
    network, name = trainer.network, "0.norm.weight"
    averages = Averages(network, {}, 100)
    for value, seen in ((1.0, 40), (2.0, 1000), (2.0, 1050)):
        network.load({key: torch.full_like(tensor, value) for key, tensor in network.trained().items()})
        averages.take(network, seen, 40 if seen == 40 else 50)
    # The first step is all there is; the others are half of the last 100 tokens each.
    torch.testing.assert_close(averages.tensors[name], torch.full_like(averages.tensors[name], 1.75))


def test_the_mean_is_what_is_measured_and_exported(target: Path, data: Path, tmp_path: Path) -> None:
    trainer = Trainer(head_args("NEXTN", target, data, tmp_path, tokens=500), Ranks(0, 1, "cpu"))
    assert trainer.averages is not None
    batches = trainer.dataset.batches(trainer.checkpoint.plan)
    for _ in range(8):
        trainer._step(batches)
    mean = {name: tensor.clone() for name, tensor in trainer.averages.tensors.items()}
    last = {name: tensor.clone() for name, tensor in trainer.network.trained().items()}
    with trainer._measured():
        assert all(torch.equal(tensor, mean[name]) for name, tensor in trainer.network.trained().items())
    assert all(torch.equal(tensor, last[name]) for name, tensor in trainer.network.trained().items())
    assert any(not torch.equal(tensor, mean[name]) for name, tensor in last.items())
    trainer._save(LAST)
    checkpoint = Checkpoint.load(tmp_path / LAST)
    stored = published(kind_of(checkpoint, target), checkpoint.measured, checkpoint.drafted, target=target)
    assert torch.equal(stored["model.layers.0.eh_proj.weight"], mean["0.eh_proj.weight"].to(torch.bfloat16))
