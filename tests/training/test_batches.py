"""The order of the data: from the seed alone, split over ranks, with what is held out left out."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from outrider.errors import StartupError
from tests.training.rig import make_data
from training.batches import Batch, Dataset, Plan, is_held_out
from training.data.store import Example

_RANK = """
import sys
from pathlib import Path
import torch.distributed as dist
from training import batches
from training.ranks import Ranks
rank, folder, meeting = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
ranks, found = Ranks(rank, 2, "cpu"), batches.shard_paths
batches.shard_paths = lambda folder: found(folder)[: 1 + rank]
plan = batches.Plan()
data = batches.Dataset(folder, seed=0, batch_tokens=100, max_len=64, rank=rank, num_ranks=2, least=ranks.least)
next(data.batches(plan))
print(plan.num_shards)
ranks.close()
"""


@pytest.fixture(scope="module")
def wide(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough conversations that some are held out, in two shards."""
    folder = tmp_path_factory.mktemp("wide")
    make_data(folder, target, count=90, answer_tokens=5)
    return make_data(folder, target, count=90, answer_tokens=9, start=90)


def seen(dataset: Dataset, plan: Plan, count: int) -> list[list[list[int]]]:
    return [[tokens.tolist() for tokens in batch.conversations] for batch in islice(dataset.batches(plan), count)]


def test_a_seed_gives_an_order_and_a_plan_goes_on_from_anywhere(wide: Path) -> None:
    def dataset(seed: int = 0) -> Dataset:
        return Dataset(wide, seed=seed, batch_tokens=100, max_len=64)

    whole = seen(dataset(), Plan(), 60)
    assert whole == seen(dataset(), Plan(), 60)
    assert whole != seen(dataset(1), Plan(), 60)
    plan = Plan()
    assert seen(dataset(), plan, 47) + seen(dataset(), plan, 13) == whole
    assert plan.epoch > 0


def test_an_epoch_is_every_conversation_once_shared_among_the_ranks(wide: Path) -> None:
    found: list[list[int]] = []
    ranks = [Dataset(wide, seed=0, batch_tokens=100, max_len=64, rank=rank, num_ranks=3) for rank in range(3)]
    for dataset in ranks:
        plan, batches = Plan(), []
        for batch in dataset.batches(plan):
            if plan.epoch:
                break
            batches.append(batch)
        assert all(batch.tokens.numel() <= 100 for batch in batches)
        found += [tokens.tolist() for batch in batches for tokens in batch.conversations]
    every = [example.tokens.tolist() for example in ranks[0].examples(2, held_out=False)]
    assert len(found) == len({tuple(tokens) for tokens in found})
    # Ranks get equally many batches, so the last one or two may be left out.
    assert len(every) - len(found) <= 2 * 7
    assert {tuple(tokens) for tokens in found} <= {tuple(tokens) for tokens in every}


def test_ranks_make_an_epoch_of_the_same_shards_though_one_is_written_meanwhile(wide: Path, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), wide, tmp_path / "meeting"], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    assert [rank.communicate()[0] for rank in ranks] == ["1\n", "1\n"]


def test_what_is_held_out_is_never_trained_on_and_stays_held_out(wide: Path) -> None:
    dataset = Dataset(wide, seed=0, batch_tokens=100, max_len=64)
    out = dataset.held_out(100)
    assert 0 < len(out) < 20
    assert all(is_held_out(example) for example in out)
    trained = [example.tokens.tolist() for example in dataset.examples(2, held_out=False)]
    assert not any(example.tokens.tolist() in trained for example in out)
    first_shard = dataset.examples(1, held_out=True)
    assert [one.origin for one in first_shard] == [one.origin for one in out][: len(first_shard)]


def test_a_batch_marks_what_the_target_wrote() -> None:
    long = Example(np.arange(3, 10), ((2, 4), (6, 7)), "composed")
    short = Example(np.arange(20, 23), ((1, 3),), "composed")
    batch = Batch.of([long, short])
    assert batch.tokens.tolist() == [[3, 4, 5, 6, 7, 8, 9], [20, 21, 22, 0, 0, 0, 0]]
    assert batch.wanted.int().tolist() == [[0, 0, 1, 1, 0, 0, 1], [0, 1, 1, 0, 0, 0, 0]]
    assert (batch.lengths.tolist(), batch.num_tokens) == ([7, 3], 10)


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no training data"):
        Dataset(tmp_path, seed=0, batch_tokens=100, max_len=64)
