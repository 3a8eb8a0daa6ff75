"""Smoothed weights: the same model before it is rounded, a better one after."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.batch import BatchBuffers
from engine.config import ModelConfig
from engine.feature_spec import FeatureSpec
from engine.kv_pool import KVPool
from engine.models.llama import TorchLlama
from engine.models.llama_weights import LlamaWeights, tensor_shapes
from engine.runner import ModelRunner
from engine.smoothing import SmoothedWeights
from kernels.attention import torch_native
from tests.engine.tiny import VOCAB_SIZE, save_model, sessions

CPU = torch.device("cpu")
NUM_SLOTS, MAX_LEN = 200, 64
FAMILIES = ("llama", "llama-biased", "llama3-rope", "qwen2", "qwen3")
Tensors = dict[str, torch.Tensor]


def tensors_of(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> tuple[ModelConfig, Tensors]:
    """A random model with a few channels of its norms and gates that are far larger than the others, as models have."""
    state = save_model(name, folder).state_dict()
    rng = np.random.default_rng(5)
    for key, tensor in state.items():
        if key.endswith("layernorm.weight"):
            tensor[rng.integers(0, len(tensor), 3)] *= 15
        if key.endswith("up_proj.weight"):
            tensor[rng.integers(0, len(tensor), 3)] *= 15
    config = ModelConfig.from_folder(folder)
    return config, {key: state[key].to(dtype) for key in tensor_shapes(config)}


def weights_of(config: ModelConfig, tensors: Tensors, *, smooth: bool) -> LlamaWeights:
    if not smooth:
        return LlamaWeights(config, iter(tensors.items()), None, CPU)
    return SmoothedWeights(config, iter(tensors.items()), None, CPU, None)


def logits_of(config: ModelConfig, tensors: Tensors, *, smooth: bool, quantization: str | None = None) -> torch.Tensor:
    dtype = next(iter(tensors.values())).dtype
    pool = KVPool(config, FeatureSpec(), NUM_SLOTS, dtype, CPU)
    decoder = TorchLlama(
        config, weights_of(config, tensors, smooth=smooth), pool, FeatureSpec(), torch_native.attention, MAX_LEN,
        quantization,
    )  # fmt: skip
    table = np.zeros((1, MAX_LEN), np.int32)
    buffers = BatchBuffers(table, vocab_size=VOCAB_SIZE, num_slots=NUM_SLOTS, num_positions=MAX_LEN, max_tokens=99)
    runner = ModelRunner(
        config, decoder, pool, table, buffers, dtype=dtype, device=CPU, model_path=Path(), backend="", numerics=""
    )
    tokens = np.random.default_rng(3).integers(0, VOCAB_SIZE, 50).tolist()
    return runner.forward([sessions(runner, 1)[0].segment(tokens)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_smoothed_model_is_the_same_to_the_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config, tensors = tensors_of(name, tmp_path, dtype)
    plain, smoothed = (list(weights_of(config, tensors, smooth=smooth).layers()) for smooth in (False, True))
    for field in ("input_norm", "qkv", "post_norm", "gate_up", "down"):
        assert not torch.equal(getattr(plain[1], field), getattr(smoothed[1], field)), field
    assert torch.equal(logits_of(config, tensors, smooth=False), logits_of(config, tensors, smooth=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_in_8_bits_it_is_closer_to_what_it_was(name: str, tmp_path: Path) -> None:
    config, tensors = tensors_of(name, tmp_path)
    exact = logits_of(config, tensors, smooth=False)
    plain, smoothed = (
        (logits_of(config, tensors, smooth=smooth, quantization="int8_dynamic") - exact).std()
        for smooth in (False, True)
    )
    assert smoothed < 0.75 * plain


def test_channels_that_are_nothing(tmp_path: Path) -> None:
    """A norm's weight of 0, a column that reads nothing, a layer of zeros."""
    config, tensors = tensors_of("llama", tmp_path)
    layer = "model.layers.1."
    tensors[f"{layer}input_layernorm.weight"][:5] = 0
    tensors[f"{layer}mlp.down_proj.weight"][:, 7:20] = 0
    tensors["model.layers.2.mlp.up_proj.weight"].zero_()
    exact = logits_of(config, tensors, smooth=False)
    assert exact.isfinite().all()
    assert torch.equal(exact, logits_of(config, tensors, smooth=True))


def test_what_was_moved_has_a_digest(tmp_path: Path) -> None:
    """It is the same on any number of threads: replicas of a target know each other by it."""
    config, tensors = tensors_of("llama", tmp_path)
    before, digests = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        weights = weights_of(config, tensors, smooth=True)
        assert isinstance(weights, SmoothedWeights)
        list(weights.layers())
        digests.append(weights.digest)
    torch.set_num_threads(before)
    assert len(set(digests)) == 1
    tensors["model.layers.0.input_layernorm.weight"][50] *= 100
    weights = weights_of(config, tensors, smooth=True)
    list(weights.layers())
    assert isinstance(weights, SmoothedWeights)
    assert weights.digest != digests[0]
