"""The forward pass of Llama-family decoders in torch's operators: any device, any dtype.

Flat rows in, logits out; keys, values and features go into the pool. One call each for q, k and v together and for gate
and up together; no loop over tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

from engine.attention import Attention
from engine.batch import Batch
from engine.config import ModelConfig
from engine.feature_spec import FeatureSpec
from engine.kv_pool import KVPool
from engine.models.llama_weights import LayerWeights, LlamaWeights
from engine.quantization import MakeLinear, head_maker, linear_maker
from engine.rope import rope_rows
from kernels.attention.layout import AttentionLayout
from kernels.attention.pool import store
from kernels.gating import gated
from kernels.norm import add_rms_norm, rms_norm
from kernels.rope import apply_rope
from kernels.transfer import to_device

Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class StepRows(NamedTuple):
    """A step's rows on the device, T of them."""

    tokens: torch.Tensor
    """int [T]"""
    positions: torch.Tensor
    """int [T]"""
    slots: torch.Tensor
    """int64 [T]: where their keys, values and features go."""
    logit_rows: torch.Tensor | None
    """int [L]; None: all of them."""

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> StepRows:
        """Sent to the device without waiting for it."""
        layout = batch.layout
        arrays = (layout.positions, layout.slots, batch.logit_rows)
        positions, slots, logit_rows = (to_device(array, device) for array in arrays)
        tokens = to_device(batch.tokens, device) if batch.device_tokens is None else batch.device_tokens
        return cls(tokens, positions, slots.long(), logit_rows)


class Layer:
    """One decoder layer, its matrices packed. `window`: how far back it sees, 0 to the beginning."""

    def __init__(self, config: ModelConfig, weights: LayerWeights, make_linear: MakeLinear, window: int = 0) -> None:
        self.config = config
        self.window = window
        self.input_norm = weights.input_norm
        self.post_norm = weights.post_norm
        self.q_norm = weights.q_norm
        self.k_norm = weights.k_norm
        self.qkv = make_linear(weights.qkv, weights.qkv_bias)
        self.output = make_linear(weights.output, weights.output_bias)
        self.gate_up = make_linear(weights.gate_up, None)
        self.down = make_linear(weights.down, None)

    def before(self, x: torch.Tensor, more: torch.Tensor | None, rope: torch.Tensor) -> Projected:
        """Computes what attention takes from rows x [T, hidden] plus `more`, which the layer before has left to be
        added: that sum, queries [T, heads, head_dim], keys and values [T, kv_heads, head_dim]."""
        x, q, k, v = self.projected(x, more)
        return x, apply_rope(q, rope), apply_rope(k, rope), v

    def projected(self, x: torch.Tensor, more: torch.Tensor | None) -> Projected:
        """Computes what `before` does, queries and keys not yet rotated."""
        config = self.config
        x, normed = _summed(x, more, self.input_norm, config.rms_eps)
        heads = self.qkv(normed).view(len(x), -1, config.head_dim)
        q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, config.rms_eps), rms_norm(k, self.k_norm, config.rms_eps)
        return x, q, k, v

    def after(self, x: torch.Tensor, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's output [T, hidden], as two that are to be added, from its input x and what attention made of it,
        [T, heads, head_dim]: the sum goes with the norm that reads it."""
        attended = self.output(mixed.reshape(len(x), self.config.q_size))
        x, normed = add_rms_norm(x, attended, self.post_norm, self.config.rms_eps)
        return x, self.down(gated(self.gate_up(normed)))


class TorchLlama:
    """A whole decoder over a pool.

    compile_max_batch: steps of at most so many sessions run layers compiled by torch.compile; 0: none do. The parts
    before and after attention are compiled, once for all layers and any number of rows.
    rope_and_store: rotates queries and keys and writes keys and values to the pool in one go, where there is such a
    kernel (kernels.attention.triton_rope); steps that run compiled layers do without.
    """

    likeliest: list[int] | None = None

    def __init__(
        self, config: ModelConfig, weights: LlamaWeights, pool: KVPool, features: FeatureSpec, attention: Attention,
        num_positions: int, quantization: str | None = None, *, compile_max_batch: int = 0,
        rope_and_store: Callable[..., torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.pool = pool
        self.features = features
        self.attention = attention
        make_linear = linear_maker(quantization)
        if compile_max_batch and quantization is None:
            make_linear = _plain_linear  # the compiler cannot see into oneDNN's packed weights
        windows = config.windows or (0,) * config.num_layers
        layers = zip(weights.layers(), windows, strict=True)
        self.layers = [Layer(config, layer, make_linear, window) for layer, window in layers]
        self._rope_and_store = rope_and_store
        self._plain: tuple[Any, Any] = (Layer.before, Layer.after)
        self._compiled = self._plain
        self._compile_max_batch = compile_max_batch
        if compile_max_batch:
            self._compiled = (torch.compile(Layer.before, dynamic=True), torch.compile(Layer.after, dynamic=True))
        top = weights.top()
        self.embedding = top.embedding
        self.norm = top.norm
        self.num_outputs = len(top.head)
        self.head = head_maker(quantization)(top.head, None)
        self.rope = rope_rows(config, num_positions).to(self.embedding.device)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits, fp32 [len(batch.logit_rows), vocab]."""
        return self.run(StepRows.of(batch, self.embedding.device), batch.layout).float()

    @torch.inference_mode()
    def run(self, rows: StepRows, layout: AttentionLayout) -> torch.Tensor:
        """Logits, as the head gives them, [L, vocab]. Rows beyond the layout's are padding; theirs mean nothing."""
        compiled = len(layout.num_rows) <= self._compile_max_batch
        before, after = self._compiled if compiled else self._plain
        scale, rope, x = self.config.head_dim**-0.5, self.rope[rows.positions], self.embedding[rows.tokens]
        kept: list[torch.Tensor] = []
        more: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            k_pool, v_pool = self.pool.k[index], self.pool.v[index]
            if self._rope_and_store is not None and not compiled:
                x, q, k, v = layer.projected(x, more)
                q = self._rope_and_store(q, k, v, rope, k_pool, v_pool, rows.slots)
            else:
                x, q, k, v = before(layer, x, more, rope)
                store(k_pool, rows.slots, k)
                store(v_pool, rows.slots, v)
            self._keep(kept, index, x)
            x, more = after(layer, x, self.attention(q, k_pool, v_pool, layout, scale, window=layer.window))
        x, normed = _summed(x, more, self.norm, self.config.rms_eps)
        self._keep(kept, len(self.layers), x)
        if self.features.kind == "last":
            kept.append(normed)
        if self.pool.features is not None:
            self.pool.features.index_copy_(0, rows.slots, torch.cat(kept, dim=-1))
        final = normed if rows.logit_rows is None else normed[rows.logit_rows]
        return self.head(final) if len(final) else final.new_zeros((0, self.num_outputs))

    def timed_forward(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """Runs forward, timed; torch's operators are not told apart."""
        start = time.perf_counter()
        return self.forward(batch), {"all": time.perf_counter() - start}

    def _keep(self, kept: list[torch.Tensor], index: int, x: torch.Tensor) -> None:
        """Notes the state entering layer `index` where features ask for it."""
        if index in self.features.layers:
            kept.append(x)


def _summed(
    x: torch.Tensor, more: torch.Tensor | None, norm: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x plus what is still to be added to it, and the norm of that."""
    return (x, rms_norm(x, norm, eps)) if more is None else add_rms_norm(x, more, norm, eps)


def _plain_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> partial[torch.Tensor]:
    return partial(linear, weight=weight, bias=bias)
