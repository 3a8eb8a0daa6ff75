"""A draft head's step by the C kernels: one call, on CPU, over the matrices that the head has packed already."""

from __future__ import annotations

import ctypes

import torch

from engine.batch import Batch
from engine.cpu_kernels import cpu_kernels
from engine.kv_pool import KVPool
from engine.models.heads.base import Head, HeadParts, Rows
from engine.models.heads.block import Block
from engine.models.heads.step import HeadStep
from engine.models.native_decoder import NativeDecoder
from kernels.attention.cpu import COMPUTED, c_heads
from kernels.native.library import WIDTH_UNIT, CLayer, CMatrix, CModel, c_layout
from kernels.native_linear import FP32, NativeLinear


class NativeHead(NativeDecoder):
    """Steps of a head over its pool; make one with `of`."""

    def __init__(self, head: Head, parts: HeadParts, pool: KVPool, library: ctypes.CDLL) -> None:
        """Every linear layer of `parts` is a NativeLinear."""
        block, wide = head.config.block, head.dtype is torch.float32
        super().__init__(library, head, pool)
        self.hidden, self.num_logits, self.dtype = block.hidden_size, head.num_drafted, head.dtype
        layers = [self._layer(*of_layer) for of_layer in zip(parts.layers, pool.k, pool.v, strict=True)]
        is_quantised = any(_matrix(linear).format > FP32 for linear in _linears(parts))
        model = CModel(
            hidden=block.hidden_size, ffn=block.intermediate_size, num_layers=len(layers), vocab=head.num_drafted,
            wide_activations=wide or is_quantised or not library.outrider_has_bf16_dot(), wide_embedding=wide,
            gates_apart=True,
            heads=c_heads(
                pool.k.dtype, head.dtype, num_heads=block.num_heads, num_kv_heads=block.num_kv_heads,
                head_dim=block.head_dim, scale=block.head_dim**-0.5, eps=block.rms_eps, rope=self._floats(head.rope),
            ),
            layers=(CLayer * len(layers))(*layers), embedding=self._keep(head.embedding),
            final_norm=self._floats(parts.final_norm), head=_matrix(parts.output), entry=parts.entry,
            residual_normed=parts.residual_normed, carry_normed=parts.carry_normed,
            embedding_norm=self._floats(parts.embedding_norm), state_norm=self._floats(parts.state_norm),
            join=(CMatrix * 2)(*map(_matrix, parts.joins)),
            fuse=CMatrix() if parts.fuse is None else _matrix(parts.fuse), fuse_norms=self._floats(parts.fuse_norms),
            num_fuse_norms=0 if parts.fuse_norms is None else len(parts.fuse_norms),
        )  # fmt: skip
        assert isinstance(parts.output, NativeLinear)
        self._create(model, parts.output.team.num_threads, parts.output.team.arena)
        self.fuses = parts.fuse is not None
        """Whether trees can go on from features that are not fused yet."""
        self.input_width = head.config.feature_width if self.fuses else self.hidden

    @classmethod
    def of(cls, head: Head, pool: KVPool) -> NativeHead | None:
        """Makes a head's; None where the C kernels do not have its arithmetic, its matrices or its widths."""
        parts, library, block = head.parts(), cpu_kernels(), head.config.block
        if parts is None or library is None or head.device.type != "cpu" or head.dtype not in COMPUTED:
            return None
        fits = all(width % WIDTH_UNIT == 0 for width in (block.hidden_size, block.intermediate_size, block.head_dim))
        if not fits or block.windows or not all(isinstance(linear, NativeLinear) for linear in _linears(parts)):
            return None
        return cls(head, parts, pool, library)

    def forward(self, batch: Batch, states: torch.Tensor) -> HeadStep:
        """A step of rows with `states` [T, hidden], in the batch's order."""
        states = states.to(self.dtype).contiguous()
        if states.shape != (batch.num_tokens, self.hidden):
            raise ValueError(f"states of {tuple(states.shape)} for {batch.num_tokens} rows of {self.hidden} numbers")
        count = len(batch.logit_rows)
        logits = torch.empty((count, self.num_logits))
        carried = torch.empty((count, self.hidden), dtype=self.dtype)
        done = self.library.outrider_decoder_forward(
            self.decoder, ctypes.byref(c_layout(batch.layout)), batch.tokens_address, states.data_ptr(), None,
            None, batch.num_tokens, batch.logit_rows_address, count,
            logits.data_ptr(), carried.data_ptr(), None, None,
        )  # fmt: skip
        if not done:
            raise MemoryError(f"no memory for a step of {batch.num_tokens} rows")
        return HeadStep(logits, carried)

    def _layer(self, layer: Block, k_pool: torch.Tensor, v_pool: torch.Tensor) -> CLayer:
        return CLayer(
            input_norm=self._floats(layer.input_norm), post_norm=self._floats(layer.post_norm),
            q_norm=self._floats(layer.q_norm), k_norm=self._floats(layer.k_norm), qkv=_matrix(layer.qkv),
            output=_matrix(layer.output), gate_up=_matrix(layer.gate_up), down=_matrix(layer.down),
            k_pool=k_pool.data_ptr(), v_pool=v_pool.data_ptr(),
        )  # fmt: skip


def _linears(parts: HeadParts) -> list[Rows]:
    layers = [linear for layer in parts.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return [*parts.joins, *layers, parts.output, *([] if parts.fuse is None else [parts.fuse])]


def _matrix(linear: Rows) -> CMatrix:
    assert isinstance(linear, NativeLinear)
    return linear.matrix
