"""Channels evened out before activations are coded in 8 bits: SmoothQuant (Xiao et al., 2023), done at load.

A few channels of what a norm or a gate gives are far larger than the rest, and a row's one scale leaves the rest few
codes. So each channel is divided by a power of two where it is made (a norm's weight, a row of `up`), and the column
that reads it is multiplied by the same. Unrounded, the model stays what it was, to the bit (in fp16 all but its
smallest weights); rounded to 8 bits, the embedded model loses half as much.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from engine.config import ModelConfig
from engine.models.llama import Layer
from engine.models.llama_weights import LayerWeights, LlamaWeights
from engine.rope import rope_rows

# Which channels are large hardly depends on the text: tokens spread over the first eighth of the vocabulary, where
# those lie that are seen often, find them as well as prose does.
_TOKENS = 128
_SHARE_OF_VOCAB = 8
_GOLDEN = 0.6180339887498949
_MOST_BITS = 8
_ROWS_AT_ONCE = 4096


class SmoothedWeights(LlamaWeights):
    """A decoder's weights, smoothed layer by layer as they are read."""

    def __init__(
        self, config: ModelConfig, tensors: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype | None,
        device: torch.device, output_rows: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Reads weights as LlamaWeights does."""
        super().__init__(config, tensors, dtype, device, output_rows)
        self._rope = rope_rows(config, _TOKENS).to(device)
        self._digest = hashlib.sha256()

    @property
    def digest(self) -> str:
        """Digest of all that was moved, as sixteen hex digits; after `layers`."""
        return self._digest.hexdigest()[:16]

    def layers(self) -> Iterator[LayerWeights]:
        """The layers in order."""
        x: torch.Tensor | None = None
        for layer in super().layers():
            if x is None:
                x = self.embedding[_sample(self._config.vocab_size, self._rope.device)].double()
            x, moved = _run(self._config, layer, x, self._rope)
            for bits in moved:
                self._digest.update(bits.to("cpu", torch.int8).numpy().tobytes())
            _smooth(layer, *moved)
            yield layer


class _Watched:
    """A product in fp64, which notes the root mean square of each channel of its input.

    In fp64, for what is noted is rounded to whole bits: in fp32 another number of threads now and then makes another.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.sizes = torch.empty(0)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]"""
        self.sizes = x.square().mean(dim=0).sqrt()
        y = torch.cat([linear(x, rows.double()) for rows in self.weight.split(_ROWS_AT_ONCE)], dim=-1)
        return y if self._bias is None else y + self._bias


def _sample(vocab_size: int, device: torch.device) -> torch.Tensor:
    """_TOKENS ids, evenly spread."""
    spread = torch.arange(_TOKENS, dtype=torch.float64, device=device) * _GOLDEN % 1.0
    return (spread * (vocab_size // _SHARE_OF_VOCAB)).long()


def _run(
    config: ModelConfig, weights: LayerWeights, x: torch.Tensor, rope: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    """The layer's output for rows x [T, hidden] of one sequence, and what to move of qkv, gate_up and down."""
    layer = Layer(config, weights, _Watched)
    x, *parts = layer.before(x, None, rope)
    q, k, v = (part.transpose(0, 1)[None] for part in parts)
    mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x, more = layer.after(x, mixed[0].transpose(0, 1))
    return x + more, [_bits(product) for product in (layer.qkv, layer.gate_up, layer.down)]


def _smooth(layer: LayerWeights, of_qkv: torch.Tensor, of_gate_up: torch.Tensor, of_down: torch.Tensor) -> None:
    """Divides channels where they are made by so many powers of two, and multiplies the columns that read them."""
    gate, up = layer.gate_up.chunk(2)
    gate_up = torch.cat([gate, _times(up, -of_down[:, None])])
    layer.input_norm, layer.qkv = _times(layer.input_norm, -of_qkv), _times(layer.qkv, of_qkv)
    layer.post_norm, layer.gate_up = _times(layer.post_norm, -of_gate_up), _times(gate_up, of_gate_up)
    layer.down = _times(layer.down, of_down)


def _bits(product: object) -> torch.Tensor:
    """Half of what a channel is larger than the weights that read it, in powers of two and against the median channel.

    0 for one that is always nothing, or that nothing reads.
    """
    assert isinstance(product, _Watched)
    bits = (product.sizes.log2() - product.weight.abs().amax(dim=0).double().log2()) / 2
    bits = torch.where(bits.isfinite(), bits, torch.nan)
    return (bits - bits.nanmedian()).nan_to_num(0.0).round().clamp(-_MOST_BITS, _MOST_BITS)


def _times(tensor: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    return tensor * torch.exp2(bits).to(tensor.dtype)
