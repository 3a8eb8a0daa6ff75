"""Where training starts: from the target's own last layer, so that a head begins by knowing what a layer does.

A head's layer adds to a stream of another size than the target's: its two output matrices are scaled by the ratio,
which `stream_scale` tells, so that it adds as much as it did there.
"""

from __future__ import annotations

import torch

from engine.models.heads.base import Tensors
from engine.models.heads.block import within
from engine.models.heads.target import OUTPUT_HEAD as TARGET_HEAD
from engine.models.llama_weights import tensor_shapes
from training.kinds import EAGLE, EAGLE3, NEXTN, OUTPUT_HEAD, STANDALONE, Kind
from training.target_states import TargetStates, tensor_of

_NOISE = 0.5


def initial_tensors(
    kind: Kind, target: TargetStates, drafted: torch.Tensor, *, seed: int, stream_scale: float
) -> dict[str, torch.Tensor]:
    """Every trained tensor, fp32. `drafted` int64 [n]: the tokens of an output head of its own."""
    generator = torch.Generator().manual_seed(seed)
    if kind.algorithm == STANDALONE:
        return _shallow(kind, target)
    shapes = kind.shapes(len(drafted))
    norm = _read(target, "model.norm.weight")
    block = _block(kind, target, generator, stream_scale)
    tensors = {name: torch.ones(shape) for name, shape in shapes.items() if len(shape) == 1}
    if kind.algorithm == EAGLE:
        own = {"fc.weight": _joined(shapes["fc.weight"], generator), "fc.bias": torch.zeros(shapes["fc.bias"])}
        own |= {f"layers.0.{name}": tensor for name, tensor in block.items() if name != "input_layernorm.weight"}
    elif kind.algorithm == EAGLE3:
        own = {"fc.weight": _joined(shapes["fc.weight"], generator), "norm.weight": norm}
        own |= {f"layers.0.{name}": tensor for name, tensor in block.items()}
        own["layers.0.hidden_norm.weight"] = block["input_layernorm.weight"]
        own["layers.0.input_layernorm.weight"] = torch.ones_like(norm)
        own[OUTPUT_HEAD] = target.vocabulary_rows(TARGET_HEAD)[drafted].float()
    else:
        assert kind.algorithm == NEXTN
        own = {"0.eh_proj.weight": _joined(shapes["0.eh_proj.weight"], generator), "0.norm.weight": norm}
        own |= {f"0.{name}": tensor for name, tensor in block.items()}
    tensors |= own
    return {name: tensors[name].clone() for name in shapes}


def spread_layers(num_target: int, num_draft: int) -> list[int]:
    """Which of the target's layers a shallow copy begins with: first and last, and between them at even distances."""
    if num_draft == 1:
        return [num_target - 1]
    return [round(i * (num_target - 1) / (num_draft - 1)) for i in range(num_draft)]


def _shallow(kind: Kind, target: TargetStates) -> dict[str, torch.Tensor]:
    tensors = {"model.norm.weight": _read(target, "model.norm.weight")}
    sources = spread_layers(target.config.num_layers, kind.config.block.num_layers)
    for index, source in enumerate(sources):
        for name in within(dict.fromkeys(kind.config.shapes(), torch.empty(0)), f"model.layers.{index}."):
            tensors[f"model.layers.{index}.{name}"] = _read(target, f"model.layers.{source}.{name}")
    return tensors


def _block(kind: Kind, target: TargetStates, generator: torch.Generator, scale: float) -> dict[str, torch.Tensor]:
    """The target's last layer as a head's: key heads repeated, noise for inputs that the target's has not."""
    prefix, config = f"model.layers.{target.config.num_layers - 1}.", target.config
    names = [name.removeprefix(prefix) for name in tensor_shapes(config) if name.startswith(prefix)]
    block = {name: _read(target, prefix + name) for name in names}
    for name in ("self_attn.k_proj.weight", "self_attn.v_proj.weight"):
        heads = block[name].unflatten(0, (config.num_kv_heads, config.head_dim))
        wanted = kind.config.block.num_kv_heads
        index = torch.arange(wanted) * config.num_kv_heads // wanted
        block[name] = heads[index].flatten(0, 1)
    heads = torch.arange(kind.config.block.num_heads) % config.num_heads
    query, output = "self_attn.q_proj.weight", "self_attn.o_proj.weight"
    block[query] = block[query].unflatten(0, (-1, config.head_dim))[heads].flatten(0, 1)
    block[output] = block[output].unflatten(1, (-1, config.head_dim))[:, heads].flatten(1)
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        block[name] = block[name] * scale
    if kind.algorithm == EAGLE3:
        for name in ("q", "k", "v"):
            own = block[f"self_attn.{name}_proj.weight"]
            noise = torch.randn(own.shape, generator=generator) * _NOISE * (2 * own.shape[1]) ** -0.5
            block[f"self_attn.{name}_proj.weight"] = torch.cat([noise, own], dim=1)
    return _known(kind, block)


def _known(kind: Kind, block: Tensors) -> dict[str, torch.Tensor]:
    """Without biases and norms that a head's layer does not have."""
    suffixes = tuple(name.partition("layers.0." if kind.algorithm != NEXTN else "0.")[2] for name in kind.shapes(1))
    return {name: tensor for name, tensor in block.items() if name in suffixes or name == "input_layernorm.weight"}


def _joined(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A matrix [hidden, k * hidden] that passes its last input on, and of the others noise."""
    hidden, width = shape
    weight = torch.randn(shape, generator=generator) * _NOISE * width**-0.5
    weight[:, width - hidden :] = torch.eye(hidden)
    return weight


def _read(target: TargetStates, name: str) -> torch.Tensor:
    return tensor_of(target.folder, name, target.load_format).float()
