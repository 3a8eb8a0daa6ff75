"""The forward pass of Llama-family decoders by the C kernels: one call a step, on CPU.

Each row's result is the same whatever rows go with it, so a token verified in a tree has exactly the logits that plain
decoding gives. Weights are held in bf16 wherever that loses nothing, in fp32 mode too: it halves what a step reads.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from engine.batch import Batch
from engine.config import ModelConfig
from engine.feature_spec import FeatureSpec
from engine.kv_pool import KVPool
from engine.models.llama_weights import LayerWeights, LlamaWeights
from engine.models.native_decoder import NativeDecoder
from engine.quantization import head_method
from engine.rope import rope_rows
from kernels.attention.cpu import COMPUTED, c_heads
from kernels.linear import interleave_gates, pack_tiles
from kernels.native.library import PARTS, WIDTH_UNIT, CLayer, CLikeliest, CMatrix, CModel, c_layout
from kernels.native.memory import Arena
from kernels.native_linear import BF16, FP32
from kernels.quantize import FORMATS, pack_quantized

# Sums of INT8_DYNAMIC are whole numbers of 32 bits, of products up to 255 * 127.
MAX_DYNAMIC_INPUTS = 65_536


def is_supported(config: ModelConfig, dtype: torch.dtype, quantization: str | None) -> bool:
    """Whether the C kernels' vectors fit this model."""
    widths = (config.hidden_size, config.intermediate_size, config.head_dim)
    if quantization == "int8_dynamic" and max(*widths, config.q_size) > MAX_DYNAMIC_INPUTS:
        return False
    return quantization in {None, *FORMATS} and dtype in COMPUTED and all(width % WIDTH_UNIT == 0 for width in widths)


class NativeLlama(NativeDecoder):
    """A whole decoder over a pool, by the C kernels."""

    likeliest: list[int] | None = None

    def __init__(
        self, config: ModelConfig, weights: LlamaWeights, pool: KVPool, features: FeatureSpec, num_positions: int,
        library: ctypes.CDLL, num_threads: int, quantization: str | None, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__(library, pool)
        self.config = config
        self._method = quantization
        self._dtype = dtype
        self._arena = Arena()
        windows = config.windows or (0,) * config.num_layers
        layers = [self._layer(layer, pool.k[i], pool.v[i], windows[i]) for i, layer in enumerate(weights.layers())]
        top = weights.top()
        embedding = self._stored(top.embedding)
        self._num_outputs = len(top.head)
        self._ids = (ctypes.c_int32 * 1)()  # grows to the most rows of a step
        self._found = CLikeliest(None, ctypes.addressof(self._ids), 1, self._num_outputs)
        model = CModel(
            hidden=config.hidden_size, ffn=config.intermediate_size, num_layers=config.num_layers,
            vocab=len(top.head),
            wide_activations=quantization is not None or self._dtype is torch.float32
            or not library.outrider_has_bf16_dot(),
            wide_embedding=embedding.dtype is torch.float32,
            heads=c_heads(
                pool.k.dtype, dtype, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim, scale=config.head_dim**-0.5, eps=config.rms_eps,
                rope=self._floats(rope_rows(config, num_positions)),
            ),
            layers=(CLayer * len(layers))(*layers),
            embedding=self._keep(embedding), final_norm=self._floats(top.norm),
            head=self._matrix(top.head, None, head_method(quantization)),
        )  # fmt: skip
        self._add_features(model, features, pool)
        self._create(model, num_threads, self._arena)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits, fp32 [len(batch.logit_rows), outputs]."""
        return self._forward(batch, None)

    def timed_forward(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """Runs forward; also the seconds that each part of the step took."""
        seconds = np.zeros(len(PARTS))
        logits = self._forward(batch, seconds.ctypes.data)
        return logits, dict(zip(PARTS, seconds.tolist(), strict=True))

    def _forward(self, batch: Batch, seconds: int | None) -> torch.Tensor:
        num_logits = len(batch.logit_rows)
        logits = torch.empty((num_logits, self._num_outputs))
        if num_logits > len(self._ids):
            self._ids = (ctypes.c_int32 * num_logits)()
            self._found.ids = ctypes.addressof(self._ids)
        done = self.library.outrider_decoder_forward(
            self.decoder, ctypes.byref(c_layout(batch.layout)), batch.tokens_address, None, None, None,
            batch.num_tokens, batch.logit_rows_address, num_logits, logits.data_ptr(), None, ctypes.byref(self._found),
            seconds,
        )  # fmt: skip
        if not done:
            raise MemoryError(f"no memory for a step of {batch.num_tokens} tokens")
        self.likeliest = self._ids[:num_logits]
        return logits

    def _layer(self, weights: LayerWeights, k_pool: torch.Tensor, v_pool: torch.Tensor, window: int) -> CLayer:
        return CLayer(
            input_norm=self._floats(weights.input_norm), post_norm=self._floats(weights.post_norm),
            q_norm=self._floats(weights.q_norm), k_norm=self._floats(weights.k_norm),
            qkv=self._matrix(weights.qkv, weights.qkv_bias, self._method),
            output=self._matrix(weights.output, weights.output_bias, self._method),
            gate_up=self._matrix(interleave_gates(weights.gate_up), None, self._method),
            down=self._matrix(weights.down, None, self._method),
            k_pool=k_pool.data_ptr(), v_pool=v_pool.data_ptr(), window=window,
        )  # fmt: skip

    def _add_features(self, model: CModel, features: FeatureSpec, pool: KVPool) -> None:
        if pool.features is None:
            return
        layers = torch.tensor(features.layers, dtype=torch.int32)
        model.features, model.feature_width = pool.features.data_ptr(), pool.features.shape[1]
        model.last_feature = features.kind == "last"
        model.num_aux, model.aux_layers = len(features.layers), self._keep(layers)

    def _matrix(self, weight: torch.Tensor, bias: torch.Tensor | None, method: str | None) -> CMatrix:
        if method is None:
            packed = pack_tiles(self._stored(weight))
            layout = FP32 if packed.dtype is torch.float32 else BF16
        else:
            packed, layout = pack_quantized(weight, method), FORMATS[method]
        packed = self._arena.place(packed)
        return CMatrix(self._keep(packed), self._floats(bias), weight.shape[0], weight.shape[1], layout)

    def _stored(self, weight: torch.Tensor) -> torch.Tensor:
        """bf16 in bf16 mode, and where it holds every number exactly; else fp32."""
        narrow = weight.to(torch.bfloat16)
        if self._dtype is torch.bfloat16 or weight.dtype is torch.bfloat16 or torch.equal(narrow.to(weight), weight):
            return narrow
        return weight.float()
