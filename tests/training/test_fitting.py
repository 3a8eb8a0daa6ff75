"""A head begins by guessing the target's next state as well as a linear map can."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cosine_similarity

from tests.training.rig import head_args
from training.batches import Batch
from training.loop import Trainer
from training.losses import unrolled
from training.ranks import Ranks


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "NEXTN"])
def test_the_first_outputs_point_to_the_next_states(algorithm: str, target: Path, data: Path, tmp_path: Path) -> None:
    trainer = Trainer(head_args(algorithm, target, data, tmp_path), Ranks(0, 1, "cpu"))
    batch = Batch.of(trainer.dataset.examples(1, held_out=False)[:6])
    states = trainer.target(batch.conversations)
    with torch.inference_mode():
        (found,) = unrolled(trainer.kind, trainer.network.built(), batch, states, 1)
        head = trainer.network.built_for_loss()[0]
        # Of what feeds the output head; the row that predicts position p has token p - 1, whose state is the next.
        guessed = head.logits(found.outputs)
        next_states = states.last[:, found.predicted_pos - 1][found.rows]
        assert float(cosine_similarity(guessed, next_states, dim=-1).mean()) > 0.55
        before = states.last[:, found.predicted_pos - 2][found.rows]
        assert float(cosine_similarity(before, next_states, dim=-1).mean()) < 0.5
