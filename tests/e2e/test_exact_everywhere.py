"""In every shape of the verify engine, the output with speculation is that of the same engine without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.pair import drafter_of, running
from tests.engine.heads import make

RNG = np.random.default_rng(11)
SHARED = RNG.integers(3, make.VOCAB, size=70).tolist()
PROMPTS = [SHARED[:size] + RNG.integers(3, make.VOCAB, size=5).tolist() for size in (0, 12, 33, 65)] + [[9]]
TREE = {"speculative_num_steps": 4, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 9}
TOKENS = 48  # four sessions of these need more than the tight pool has, and so do the two longest
TIGHT = {"max_total_tokens": 192, "context_length": 128}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "seed": 3},
    "penalised": {
        "temperature": 0.7, "seed": 4, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2,
        "min_tokens": 6, "logit_bias": {7: 2.0, 9: -100.0},
    },
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    **{f"page {size}": {"page_size": size, **TIGHT} for size in (1, 16, 32, 64)},
    "chunk 7": {"chunked_prefill_size": 7, **TIGHT},
    "no cache": {"disable_radix_cache": True, **TIGHT},
    "lpm": {"schedule_policy": "lpm", **TIGHT},
    "torch": {"attention_backend": "torch_native"},
    "torch, pages of 16": {"attention_backend": "torch_native", "page_size": 16, **TIGHT},
    **{f"{method}": {"quantization": method} for method in ("int8", "int8_dynamic", "int4")},
    "int8, pages of 32": {"quantization": "int8", "page_size": 32, **TIGHT},
    "fp8 keys": {"kv_cache_dtype": "fp8_e4m3"},
    "fp8 keys, bfloat16, pages of 16": {
        "dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2", "page_size": 16, **TIGHT,
    },
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, int8_dynamic, pages of 16": {
        "dtype": "bfloat16", "quantization": "int8_dynamic", "page_size": 16, **TIGHT,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make.write_target(tmp_path_factory.mktemp("target"), max_position_embeddings=256).folder


@pytest.mark.asyncio
@pytest.mark.parametrize("shape", list(SHAPES))
async def test_speculation_changes_nothing(target: Path, shape: str) -> None:
    """The draft model is the target, in trees, so that much is accepted; prompts come twice, for the cache."""
    flags = SHAPES[shape]
    async with running(target, **{**flags, "max_total_tokens": 4096}) as pair:
        plain = {name: await pair.answers(PROMPTS, TOKENS, **given) for name, given in SAMPLINGS.items()}
    drafter = drafter_of(target, "STANDALONE", speculative_draft_model_path=str(target), **TREE)
    async with running(target, **flags, disable_speculation_brake=True) as pair, pair.drafting(drafter):
        # Large pages hold other numbers of sessions.
        is_tight = "max_total_tokens" in flags and flags.get("page_size", 1) <= 16
        for turn in range(20):
            if turn >= 2 and not (is_tight and pair.loop.scheduler.num_preemptions == 0):
                break  # else sessions came so far apart that they never ran together
            for name, given in SAMPLINGS.items():
                found = await pair.answers(PROMPTS, TOKENS, **given)
                for own, other in zip(found, plain[name], strict=True):
                    assert own.tokens == other.tokens, name
        stats = pair.loop.stats
        assert stats.accepted_tokens > stats.verify_steps // 4  # drafts really carried the output
        if is_tight:
            assert pair.loop.scheduler.num_preemptions > 0
