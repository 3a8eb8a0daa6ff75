"""What flags choose of a model's execution: which decoder serves, what the pool keeps, and that outputs stay right."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from structlog.testing import capture_logs

from engine.attention import AttentionChoice
from engine.execution import Execution, GraphSizes
from engine.models.llama import TorchLlama
from engine.runner import ModelRunner
from outrider.args import VerifyArgs
from outrider.errors import StartupError
from tests.engine.tiny import SHAPE, VOCAB_SIZE, Recorded, saved_model, sessions
from verify_service.loading import execution_of

# What torch's own compiler warns of when it is imported.
WITH_INDUCTOR = pytest.mark.skipif(
    os.environ.get("OUTRIDER_TEST_INDUCTOR") != "1",
    reason="the compiler behind takes minutes on CPU: OUTRIDER_TEST_INDUCTOR=1 runs it",
)
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

folder = saved_model("llama")


def load(folder: Path, **settings: Any) -> ModelRunner:
    execution = Execution(**settings)
    return ModelRunner.load(folder, dtype="float32", num_slots=300, max_sessions=2, max_len=120, execution=execution)


def logits_of(runner: ModelRunner) -> torch.Tensor:
    """Logits of a prompt, a tree and single tokens."""
    rng = np.random.default_rng(4)
    one, two = sessions(runner, 2)
    first = runner.forward([one.segment(rng.integers(0, VOCAB_SIZE, 50).tolist()), two.segment([4, 5])])
    tree = one.tree(rng.integers(0, VOCAB_SIZE, 6).tolist(), [-1, 0, 0, 1, 1, 4])
    return torch.cat([first, runner.forward([tree, two.segment([9])]), runner.forward([two.segment([3])])])


def test_which_decoder_serves(folder: Path) -> None:
    native = load(folder)
    assert native.backend.startswith("native")
    named, fp8 = {"attention": AttentionChoice("torch_native")}, {"kv_cache_dtype": "fp8_e4m3"}
    for settings, words, is_exact in (
        (named, ["torch ", "torch_native", "torch.float32"], True),
        (fp8, ["native ", "torch.float8_e4m3fn"], True),
        ({**fp8, **named}, ["torch ", "torch_native", "torch.float8_e4m3fn"], False),
        ({"compile_max_batch": 2}, ["torch ", "compiled"], True),
    ):
        with capture_logs() as logs:
            runner = load(folder, **settings)
        told = any("speculation and batches change some answers" in entry["event"] for entry in logs)
        assert told is not is_exact
        assert runner.backend.startswith(words[0])
        assert all(word in runner.backend for word in words)
        assert runner.numerics_id != native.numerics_id


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention": AttentionChoice("triton")}, "triton needs a CUDA device; this one is cpu: use torch_native"),
        ({"attention": AttentionChoice("flashinfer")}, "flashinfer needs a CUDA device"),
        ({"attention": AttentionChoice("auto", prefill="fa3")}, "'fa3' is SGLang's"),
        ({"attention": AttentionChoice(verify="decode")}, "--speculative-attention-mode is decode"),
        ({"attention": AttentionChoice("flashinfer"), "kv_cache_dtype": "fp8_e5m2"}, "flashinfer does not read"),
        ({"kv_cache_dtype": "fp4"}, "--kv-cache-dtype is 'fp4'; it must be auto or fp8_e4m3 or fp8_e5m2"),
        ({"graphs": GraphSizes(4, 4, required=True)}, "--cuda-graph-max-bs is given"),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        load(folder, **settings)


def test_compiling_and_quantised_weights_exclude_each_other(folder: Path) -> None:
    with pytest.raises(StartupError, match="--enable-torch-compile does not go with --quantization"):
        ModelRunner.load(
            folder, num_slots=9, max_sessions=1, max_len=9, quantization="int8",
            execution=Execution(compile_max_batch=1),
        )  # fmt: skip


def test_steps_of_all_sizes_run_without_graphs(folder: Path) -> None:
    """So that a GPU compiles the kernels of a prompt before the first one comes: those for every size of a tile."""
    runner = load(folder, attention=AttentionChoice("torch_native"))
    decoder, attention = runner._decoder, Recorded()
    assert isinstance(decoder, TorchLlama)
    decoder.attention = attention
    runner.run_each_size()
    sizes = (1, 2, 4, 8, 16, 32, 64, 120)
    assert attention.segments == {(rows, tree) for rows in sizes for tree in (False, True) if rows <= 64 or not tree}


def test_backends_agree(folder: Path) -> None:
    native, torchs = logits_of(load(folder)), logits_of(load(folder, attention=AttentionChoice("torch_native")))
    torch.testing.assert_close(torchs, native, atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", ["auto", "torch_native"])
@pytest.mark.parametrize(("name", "share"), [("fp8_e4m3", 0.15), ("fp8_e5m2", 0.3)])
def test_an_fp8_pool_stays_near(folder: Path, name: str, share: float, backend: str) -> None:
    runner = load(folder, kv_cache_dtype=name, attention=AttentionChoice(backend))
    exact = logits_of(load(folder))
    assert runner.pool.k.dtype.itemsize == 1
    assert 0 < (logits_of(runner) - exact).abs().mean() < share * exact.std()


@pytest.mark.parametrize("backend", ["auto", "torch_native"])
def test_moved_fp8_rows_are_read_where_they_went(folder: Path, backend: str) -> None:
    runner = load(folder, kv_cache_dtype="fp8_e4m3", attention=AttentionChoice(backend))
    stays, moves = sessions(runner, 2)
    tokens = [5, 9, 2, 7, 11, 3]
    runner.forward([stays.segment(tokens, 0), moves.segment(tokens, 0)])
    old = runner.slot_table[1, :6].copy()
    new = moves.take(6)
    runner.pool.move(old, new)
    runner.slot_table[1, :6] = new
    logits = runner.forward([stays.segment([4]), moves.segment([4])])
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kernel", ["1", "0"])
@pytest.mark.parametrize(
    "config",
    [
        transformers.MistralConfig(**SHAPE, sliding_window=20),
        transformers.MistralConfig(**SHAPE, sliding_window=120),
        transformers.Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=20, max_window_layers=1),
        transformers.Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=20, max_window_layers=9),
        transformers.Qwen3Config(**SHAPE, use_sliding_window=True, sliding_window=7, max_window_layers=2),
    ],
)
def test_sliding_windows_are_those_of_transformers(
    tmp_path: Path, config: transformers.PretrainedConfig, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CPU_KERNEL", kernel)
    torch.manual_seed(3)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    runner = ModelRunner.load(tmp_path, dtype="float32", num_slots=200, max_sessions=1, max_len=120)
    tokens = np.random.default_rng(8).integers(0, VOCAB_SIZE, 70).tolist()
    with torch.no_grad():
        expected = model.forward(torch.tensor([tokens])).logits[0]
    (session,) = sessions(runner, 1)
    pieces = [tokens[:40], tokens[40:41], tokens[41:64]]
    logits = torch.cat([runner.forward([session.segment(piece)]) for piece in pieces])
    torch.testing.assert_close(logits, expected[:64], atol=1e-4, rtol=0)
    # A chain of six, and a leaf beside its last.
    tree = session.tree([*tokens[64:], 1], [-1, 0, 1, 2, 3, 4, 4])
    torch.testing.assert_close(runner.forward([tree])[:6], expected[64:], atol=1e-4, rtol=0)


def test_flags_say_how_steps_are_computed() -> None:
    args = VerifyArgs(
        attention_backend="triton", decode_attention_backend="flashinfer", speculative_attention_mode="decode",
        kv_cache_dtype="fp8_e5m2", page_size=16, max_verify_nodes=7, max_running_requests=500,
    )  # fmt: skip
    assert execution_of(args) == Execution(
        AttentionChoice("triton", None, "flashinfer", "decode"), "fp8_e5m2", 16, GraphSizes(160, 8)
    )
    compiled = VerifyArgs(enable_torch_compile=True, torch_compile_max_bs=4, disable_cuda_graph=True)
    assert execution_of(compiled) == Execution(compile_max_batch=4)
    given = VerifyArgs(cuda_graph_max_bs=6)
    assert execution_of(given).graphs == GraphSizes(6, 33, required=True)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, WITH_INDUCTOR])])
def test_compiled_layers_give_what_plain_ones_give(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # or it starts workers, which takes longer
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiler))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    runner = load(folder, compile_max_batch=1)
    plain = load(folder, attention=AttentionChoice("torch_native"))
    outputs = []
    for each in (runner, plain):
        one, two = sessions(each, 2)
        steps = [[one.segment([5, 9, 2])], [one.segment(list(range(31)))], [one.segment([7, 7]), two.segment([1])]]
        outputs.append(torch.cat([each.forward(step) for step in steps]))
    torch.testing.assert_close(*outputs, atol=1e-4, rtol=0)
    # What comes before attention, of the first layer and of the others, and what after: any number of rows share them.
    assert counters["stats"]["unique_graphs"] == 3
