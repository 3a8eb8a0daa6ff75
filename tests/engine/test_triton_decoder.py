"""The whole decoder on Triton's kernels, small steps padded as graphs have them, against torch's own attention."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.batch import BatchBuffers
from engine.config import ModelConfig
from engine.cpu_kernels import cpu_kernels
from engine.execution import GraphSizes
from engine.feature_spec import FeatureSpec
from engine.graphs import Capturing, GraphedDecoder
from engine.kv_pool import KVPool
from engine.loader import load_checkpoint
from engine.models.llama import TorchLlama
from engine.models.llama_weights import LlamaWeights, tensor_shapes
from engine.runner import Decoder, ModelRunner
from kernels.attention import torch_native
from kernels.attention.layout import AttentionLayout
from kernels.attention.triton_blocks import Heads
from kernels.attention.triton_plan import Bucket
from tests.engine.tiny import VOCAB_SIZE, save_model, sessions
from tests.kernels.interpreted import INTERPRETED, kernel_device, run_under_the_interpreter

NUM_SLOTS, MAX_LEN = 96, 40


def test_under_the_interpreter() -> None:
    run_under_the_interpreter(__file__)


def build(folder: Path, device: torch.device, kv: torch.dtype, *, triton: bool, narrow: bool = False) -> ModelRunner:
    """A runner whose steps go through padded buffers with Triton's kernels, or plainly with torch's."""
    config, features = ModelConfig.from_folder(folder), FeatureSpec.parse("last")
    _, tensors = load_checkpoint(folder, tensor_shapes(config))
    pool = KVPool(config, features, NUM_SLOTS, torch.float32, device, kv=kv, with_padding=True)
    weights = LlamaWeights(config, tensors, torch.float32, device)
    if triton:
        from kernels.attention.triton import TritonAttention
        from kernels.attention.triton_rope import rope_and_store

        attention = TritonAttention(device, narrow_trees=narrow, library=cpu_kernels())
        heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim, torch.float32)

        def prepare(layout: AttentionLayout, bucket: Bucket) -> None:
            attention.prepare(layout, heads, bucket)

        inner = TorchLlama(
            config, weights, pool, features, attention, MAX_LEN,
            rope_and_store=None if kv.itemsize == 1 else rope_and_store,
        )  # fmt: skip
        graphs = GraphedDecoder(
            inner, GraphSizes(2, 2), Capturing(prepare, AttentionLayout.see, lambda step: step, NUM_SLOTS),
            num_outputs=VOCAB_SIZE, max_len=MAX_LEN, device=device,
        )  # fmt: skip
        graphs.capture()
        decoder: Decoder = graphs
    else:
        decoder = TorchLlama(config, weights, pool, features, torch_native.attention, MAX_LEN)
    table = np.zeros((2, MAX_LEN), np.int32)
    buffers = BatchBuffers(table, vocab_size=VOCAB_SIZE, num_slots=NUM_SLOTS, num_positions=MAX_LEN, max_tokens=64)
    return ModelRunner(
        config, decoder, pool, table, buffers, dtype=torch.float32, device=device, model_path=folder, backend="",
        numerics="",
    )  # fmt: skip


def logits_of(runner: ModelRunner) -> torch.Tensor:
    """Logits of a prompt's chunk, trees of two sizes, and single tokens."""
    one, two = sessions(runner, 2)
    steps = [
        [one.segment([3, 1, 4, 1, 5, 9], 1), two.segment([2, 6])],
        [one.tree([7, 8, 9, 10], [-1, 0, 0, 1]), two.segment([5])],
        [two.tree([7, 8], [-1, 0])],
        [one.segment([11]), two.segment([12])],
        [one.segment([13])],
    ]
    return torch.cat([runner.forward(step).clone() for step in steps]).cpu()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value")  # rows of padding hold anything
@pytest.mark.parametrize(("kv", "narrow"), [(torch.float32, True), (torch.float8_e4m3fn, False)])
def test_logits(tmp_path: Path, kv: torch.dtype, narrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = kernel_device()
    save_model("qwen3", tmp_path)
    with monkeypatch.context() as patch:
        if INTERPRETED:  # where a device says so by itself
            for module in ("norm", "gating"):
                patch.setattr(f"kernels.{module}.runs_triton", lambda x: True)
        found = logits_of(build(tmp_path, device, kv, triton=True, narrow=narrow))
    wanted = logits_of(build(tmp_path, device, kv, triton=False))
    # A last bit's difference may put a key on the other side of fp8's rounding.
    atol = 1e-4 if kv is torch.float32 else 0.1 * float(wanted.std())
    torch.testing.assert_close(found, wanted, atol=atol, rtol=0)
