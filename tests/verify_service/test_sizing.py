"""The pool's size: as flags say, or as memory allows, with SGLang's head-room; and the numbers when it does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from engine.config import ModelConfig
from engine.memory import GIB, Memory, weight_bytes
from engine.models.llama_weights import tensor_shapes
from outrider.args import ServeArgs, VerifyArgs
from outrider.errors import StartupError
from verify_service.sizing import Sizes, choose_sizes, gpu_fraction, logits_bytes, outbox_bytes

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=1000, hidden_size=256, intermediate_size=512, num_layers=4, num_heads=4,
    num_kv_heads=2, head_dim=64, max_position=4096, rope_theta=1e4, rms_eps=1e-5, tied_embeddings=True,
)  # fmt: skip
SHAPES = tensor_shapes(CONFIG)
TOKEN_BYTES = 2 * 4 * 128 * 2
WEIGHTS = weight_bytes(SHAPES, 2, None)


def sizes(free: int, **flags: Any) -> Sizes:
    return choose_sizes(VerifyArgs(device="cpu", **flags), CONFIG, SHAPES, memory=Memory(free, 2 * free))


def test_a_quarter_of_a_machines_memory_at_most() -> None:
    free = GIB
    assert sizes(free).total_tokens == pytest.approx(free // 4 // TOKEN_BYTES, abs=1)
    assert sizes(free).context_length == 4096
    assert sizes(free, page_size=64).total_tokens % 64 == 0


def test_little_memory_keeps_room_for_what_serving_takes() -> None:
    """Serving takes no less there: with a share kept for it a model would load, and be killed at the first requests."""
    head_room, least = 160 * 2**20, 1024 * TOKEN_BYTES
    assert sizes(head_room + WEIGHTS + least + TOKEN_BYTES).total_tokens == pytest.approx(1024, abs=1)
    for free in (head_room + WEIGHTS + least - TOKEN_BYTES, head_room, head_room // 2, 0):
        with pytest.raises(StartupError, match=r"no room for the KV pool: 0\.\d\d GiB .* --mem-fraction-static is 0\."):
            sizes(free)
    assert sizes(head_room, max_total_tokens=1000).total_tokens == 1000


def test_weights_count() -> None:
    free = 2 * WEIGHTS
    assert sizes(free, mem_fraction_static=0.75).total_tokens == pytest.approx(WEIGHTS / 2 / TOKEN_BYTES, abs=1)
    quantised = sizes(free, mem_fraction_static=0.75, quantization="int4")
    assert quantised.total_tokens > 1.8 * sizes(free, mem_fraction_static=0.75).total_tokens


def test_no_more_than_all_sessions_can_use() -> None:
    assert sizes(64 * GIB, max_running_requests=3).total_tokens == 3 * 4096
    assert sizes(64 * GIB, max_running_requests=3, context_length=100).total_tokens == 300


def test_features_and_narrow_keys_change_what_a_token_takes() -> None:
    free = 100 * 2**20
    with_features = sizes(free, features="aux:0,2", mem_fraction_static=0.5)
    plain = sizes(free, mem_fraction_static=0.5)
    assert with_features.total_tokens * (TOKEN_BYTES + 2 * 2 * 256) == pytest.approx(
        plain.total_tokens * TOKEN_BYTES, rel=0.001
    )
    narrow = sizes(free, kv_cache_dtype="fp8_e5m2", mem_fraction_static=0.5)
    assert narrow.total_tokens == pytest.approx(2 * plain.total_tokens, abs=2)


def test_what_the_flags_say() -> None:
    chosen = sizes(GIB, max_total_tokens=1000, context_length=300, chunked_prefill_size=77, page_size=16)
    assert chosen == Sizes(992, 300, 77)
    assert sizes(GIB, max_total_tokens=500).context_length == 500


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(StartupError, match=r"no room for the KV pool: 0.01 GiB of 0.01 GiB are free, weights take"):
        sizes(WEIGHTS + 100 * TOKEN_BYTES)
    with pytest.raises(StartupError, match=r"--mem-fraction-static is 0\.100.*raise --mem-fraction-static"):
        sizes(10 * WEIGHTS, mem_fraction_static=0.1)
    with pytest.raises(StartupError, match=r"--mem-fraction-static is 1e-05, which"):
        sizes(10 * WEIGHTS, mem_fraction_static=0.00001)
    with pytest.raises(StartupError, match=r"--max-total-tokens is 1000000, of 2048 bytes each, and \d+ fit"):
        sizes(GIB, max_total_tokens=1_000_000)
    with pytest.raises(StartupError, match="--context-length is 5000; it must be at most the model's own, 4096"):
        sizes(GIB, context_length=5000)
    changing = replace(CONFIG, changing_rope="dynamic")
    with pytest.raises(StartupError, match="its `dynamic` rope scaling beyond 4096 positions is not supported"):
        choose_sizes(VerifyArgs(device="cpu", context_length=5000), changing, SHAPES, memory=Memory(GIB, GIB))


def test_long_rope_has_more_where_it_is_asked_for() -> None:
    config = replace(CONFIG, changing_rope="longrope", long_position=8192)

    def longest(config: ModelConfig, length: int | None) -> int:
        args = VerifyArgs(device="cpu", context_length=length, max_running_requests=1)
        return choose_sizes(args, config, SHAPES, memory=Memory(GIB, GIB)).context_length

    with capture_logs() as logs:
        assert [longest(config.for_context(length), length) for length in (None, 100, 5000)] == [4096, 100, 5000]
    assert [(log["event"][:11], log["tokens"], log["most"]) for log in logs] == [("context cut", 4096, 8192)]
    with pytest.raises(StartupError, match=r"--context-length is 8193; it must be at most the model's own, 8192$"):
        longest(config.for_context(8193), 8193)


def test_sglangs_rule_on_gpus() -> None:
    args, eagle, standalone = (
        VerifyArgs(max_running_requests=160, speculative_algorithm=name) for name in (None, "eagle3", "STANDALONE")
    )
    # 512 + 1.5 * 2048 + 2 * 160 + 128 MiB
    assert gpu_fraction(args, 512, 24 * GIB, 0) == round(1 - 4032 / (24 * 1024), 3)
    assert gpu_fraction(args, 4096, 24 * GIB, 0) == round(1 - (4032 + 1.5 * (4096 - 2048)) / (24 * 1024), 3)
    assert gpu_fraction(args, 2048, 80 * GIB, 0) == round(1 - 10 / 80, 3)
    assert gpu_fraction(eagle, 2048, 80 * GIB, 0) == round(1 - 14 / 80, 3)
    assert gpu_fraction(standalone, 2048, 80 * GIB, 0) == round(1 - 16 / 80, 3)
    assert gpu_fraction(standalone, 2048, 8 * GIB, 0) == 0.5


def test_logits_of_many_trees_have_room_on_a_gpu() -> None:
    args = VerifyArgs(max_running_requests=160, max_verify_nodes=32)
    rows, vocab = 160 * 33, 152_064
    assert logits_bytes(args, vocab, 2) == vocab * (rows * 6 + 128 * 8)
    assert logits_bytes(args, vocab, 4) == vocab * (rows * 4 + 128 * 8)
    assert logits_bytes(VerifyArgs(max_running_requests=1, max_verify_nodes=1), 1000, 2) == 1000 * 2 * (6 + 8)
    plain = replace(args, speculative_algorithm="NONE")
    assert logits_bytes(plain, vocab, 2) == vocab * args.max_running_requests * 6 + vocab * 8 * min(
        args.max_running_requests, 128
    )
    taken = logits_bytes(args, vocab, 2)
    assert gpu_fraction(args, 2048, 24 * GIB, taken) == round(1 - (4032 + taken / 2**20) / (24 * 1024), 3)
    # Of a large GPU what stays free holds them already.
    assert gpu_fraction(args, 2048, 80 * GIB, taken) == round(1 - 10 / 80, 3)


def test_the_drafters_head_room_reaches_verify() -> None:
    args = ServeArgs(speculative_algorithm="EAGLE3", quantization="int8", mem_fraction_static=0.6)
    part = args.part(VerifyArgs)
    assert (part.speculative_algorithm, part.quantization, part.mem_fraction_static) == ("EAGLE3", "int8", 0.6)


@pytest.mark.parametrize("value", [0.0, 1.0, -0.5, 2.0])
def test_shares_lie_between_nothing_and_all(value: float) -> None:
    with pytest.raises(StartupError, match="--mem-fraction-static"):
        VerifyArgs(mem_fraction_static=value)


def test_what_waits_for_a_drafter_has_room_for_the_rows_of_all_sessions() -> None:
    """One step of many sessions of a wide model would else close some for reading slowly."""
    assert outbox_bytes(VerifyArgs(), row_bytes=0) == 8 * 2**20
    llama_70b = 3 * 8192 * 2
    for sessions in (48, 160):
        assert outbox_bytes(VerifyArgs(max_running_requests=sessions), llama_70b) >= 4 * sessions * 8 * llama_70b
    assert outbox_bytes(VerifyArgs(max_running_requests=4096), llama_70b) == 256 * 2**20
    assert outbox_bytes(VerifyArgs(drafter_outbox_bytes=1000), llama_70b) == 1000
