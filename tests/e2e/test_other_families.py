"""Heads on targets of families that transformers runs: the output is that of the same target without speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.e2e.pair import drafter_of, features_of, running
from tests.engine.heads import make
from tests.engine.heads.make import HIDDEN, VOCAB
from tests.engine.tiny import other_families

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(3, VOCAB, size=size).tolist() for size in (3, 17, 40, 70)]
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
FLAGS: dict[str, Any] = {"max_total_tokens": 1024, "chunked_prefill_size": 32}


def repeating_eagle(folder: Path) -> Path:
    """An EAGLE head that drafts what its state says, which is the token before once more: right in a loop of one."""
    head = make.eagle(folder, bias=False)
    state_alone = torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], dim=1)
    silent = {f"layers.0.{name}.weight" for name in ("self_attn.o_proj", "mlp.down_proj")}
    tensors = {"fc.weight": state_alone} | {name: torch.zeros_like(head.tensors[name]) for name in silent}
    return make.rewrite(head, tensors=tensors).folder


@pytest.mark.asyncio
@pytest.mark.parametrize("name", sorted(other_families(VOCAB, HIDDEN)))
async def test_a_head_changes_nothing(name: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(other_families(VOCAB, HIDDEN)[name], dtype=torch.float32)
    model.save_pretrained(target)
    async with running(target, **FLAGS) as pair:
        plain = [answer.tokens for answer in await pair.answers(PROMPTS, 24)]
    for algorithm, head, features in (
        ("EAGLE", repeating_eagle(tmp_path / "eagle"), "last"),
        ("EAGLE3", make.eagle3(tmp_path / "eagle3").folder, "aux:2,3,4"),
    ):
        given = {"speculative_draft_model_path": str(head), **TREE}
        assert features_of(target, algorithm, **given) == features
        drafter = drafter_of(target, algorithm, **given)
        async with running(target, features, **FLAGS) as pair, pair.drafting(drafter):
            found = await pair.answers(PROMPTS, 24)
        assert [answer.tokens for answer in found] == plain
        assert sum(answer.num_drafted for answer in found) > 50
        if algorithm == "EAGLE":
            assert pair.loop.stats.accepted_tokens > 0
