"""The forward pass of Llama-family decoders in torch's operators: any device, any dtype.

Flat rows in, logits out; keys, values and features go into the pool. One call each for q, k and v together and for gate
and up together; no loop over tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn.functional import silu

from engine.batch import Batch
from engine.config import FeatureSpec, ModelConfig
from engine.kv_pool import KVPool
from engine.models.llama_weights import LayerWeights, LlamaWeights
from kernels.attention.layout import AttentionLayout
from kernels.linear import Linear
from kernels.norm import rms_norm
from kernels.rope import apply_rope, rope_table

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionLayout, float], torch.Tensor]


class Layer:
    """One decoder layer, its matrices packed."""

    def __init__(self, config: ModelConfig, weights: LayerWeights) -> None:
        self.config = config
        self.input_norm = weights.input_norm
        self.post_norm = weights.post_norm
        self.q_norm = weights.q_norm
        self.k_norm = weights.k_norm
        self.qkv = Linear(weights.qkv, weights.qkv_bias)
        self.output = Linear(weights.output, weights.output_bias)
        self.gate_up = Linear(weights.gate_up)
        self.down = Linear(weights.down)

    def __call__(
        self, x: torch.Tensor, rope: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor,
        slots: torch.Tensor, layout: AttentionLayout, attention: Attention,
    ) -> torch.Tensor:  # fmt: skip
        """Rows x [T, hidden] through the layer; their keys and values are written to `slots` (int64 [T])."""
        config = self.config
        q, k, v = self._heads(rms_norm(x, self.input_norm, config.rms_eps))
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        k_pool.index_copy_(0, slots, k)
        v_pool.index_copy_(0, slots, v)
        mixed = attention(q, k_pool, v_pool, layout, config.head_dim**-0.5)
        x = x + self.output(mixed.reshape(len(x), config.q_size))
        gate, up = self.gate_up(rms_norm(x, self.post_norm, config.rms_eps)).chunk(2, dim=-1)
        return x + self.down(silu(gate) * up)

    def _heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self.config
        heads = self.qkv(x).view(len(x), -1, config.head_dim)
        q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, config.rms_eps), rms_norm(k, self.k_norm, config.rms_eps)
        return q, k, v


class TorchLlama:
    """A whole decoder over a pool."""

    def __init__(
        self, config: ModelConfig, weights: LlamaWeights, pool: KVPool, features: FeatureSpec, attention: Attention,
        num_positions: int, frequencies: torch.Tensor,
    ) -> None:  # fmt: skip
        self.config = config
        self.pool = pool
        self.features = features
        self.attention = attention
        self.layers = [Layer(config, layer) for layer in weights.layers()]
        top = weights.top()
        self.embedding = top.embedding
        self.norm = top.norm
        self.head = Linear(top.head)
        self.rope = rope_table(frequencies, num_positions).to(self.embedding.device)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits, fp32 [len(batch.logit_rows), vocab]."""
        device = self.embedding.device
        slots = torch.from_numpy(batch.layout.slots).to(device).long()
        rope = self.rope[torch.from_numpy(batch.layout.positions).to(device)]
        x = self.embedding[torch.from_numpy(batch.tokens).to(device)]
        kept: list[torch.Tensor] = []
        for index, layer in enumerate(self.layers):
            self._keep(kept, index, x)
            x = layer(x, rope, self.pool.k[index], self.pool.v[index], slots, batch.layout, self.attention)
        self._keep(kept, len(self.layers), x)
        rows = torch.from_numpy(batch.logit_rows).to(device)
        if self.features.kind == "last":
            x = rms_norm(x, self.norm, self.config.rms_eps)
            kept.append(x)
            final = x[rows]
        else:
            final = rms_norm(x[rows], self.norm, self.config.rms_eps)
        if self.pool.features is not None:
            self.pool.features.index_copy_(0, slots, torch.cat(kept, dim=-1))
        return self.head(final).float() if len(rows) else final.new_zeros((0, self.config.vocab_size)).float()

    def timed_forward(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """As forward; torch's operators are not told apart."""
        start = time.perf_counter()
        return self.forward(batch), {"all": time.perf_counter() - start}

    def _keep(self, kept: list[torch.Tensor], index: int, x: torch.Tensor) -> None:
        """Notes the state entering layer `index` where features ask for it."""
        if index in self.features.layers:
            kept.append(x)
