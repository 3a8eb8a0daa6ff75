"""Where training starts: from the target's own last layer, so that a head begins by knowing what a layer does, and from
what is fitted to the target's states beside it.

A head's layer adds to a stream of another size than the target's: its two output matrices are scaled by the ratio,
so that it adds as much as it did there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.models.heads.base import Tensors
from engine.models.heads.block import within
from engine.models.heads.names import OUTPUT_HEAD
from engine.models.llama_weights import tensor_shapes
from engine.tensors import OUTPUT_HEAD as TARGET_HEAD
from training.batches import Batch
from training.fitting import Basis, fitted
from training.kinds import EAGLE, EAGLE3, NEXTN, STANDALONE, Kind, source_layers
from training.shallow import copying_layer
from training.target_states import States, TargetStates, tensor_of

_READING = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")


def first_tensors(
    kind: Kind, target: TargetStates, drafted: torch.Tensor, samples: Sequence[NDArray[np.int32]],
    batches: Iterable[tuple[Batch, States]], *, seed: int,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Every trained tensor, fp32.

    drafted: int64 [n]: the tokens of an output head of its own; samples: conversations that tell how large the target's
    stream is; batches: what is fitted is fitted to these, as far as it needs them.
    """
    before, after = target.size_of_stream(samples)
    tensors = _from_target(kind, target, drafted, stream_scale=_size_entering(kind, before, after) / before)
    basis = Basis(tensors, target, batches, stream_size=before, seed=seed)
    find = copying_layer if kind.algorithm == STANDALONE else fitted
    return tensors | find(kind, basis)


def _size_entering(kind: Kind, before: float, after: float) -> float:
    """Size of a head's stream where it begins: EAGLE's with the last state, EAGLE-3's, without norms, with one raw."""
    if kind.algorithm == EAGLE:
        return after
    return before if kind.algorithm == EAGLE3 and "fc_norm.0.weight" not in kind.config.shapes() else 1.0


def _from_target(
    kind: Kind, target: TargetStates, drafted: torch.Tensor, *, stream_scale: float
) -> dict[str, torch.Tensor]:
    """Every tensor; zeros where `fitting` has to find it."""
    if kind.algorithm == STANDALONE:
        return _shallow(kind, target)
    shapes = kind.shapes(len(drafted))
    norm = _read(target, "model.norm.weight")
    block = _block(kind, target, stream_scale)
    tensors = {name: torch.ones(shape) if len(shape) == 1 else torch.zeros(shape) for name, shape in shapes.items()}
    if kind.algorithm == EAGLE:
        own = {"fc.bias": torch.zeros(shapes["fc.bias"])}
        own |= {f"layers.0.{name}": tensor for name, tensor in block.items() if name != "input_layernorm.weight"}
    elif kind.algorithm == EAGLE3:
        own = {"norm.weight": norm}
        own |= {f"layers.0.{name}": tensor for name, tensor in block.items()}
        own["layers.0.hidden_norm.weight"] = block["input_layernorm.weight"]
        own["layers.0.input_layernorm.weight"] = torch.ones_like(norm)
        own[OUTPUT_HEAD] = target.vocabulary_rows(TARGET_HEAD)[drafted].float()
    else:
        assert kind.algorithm == NEXTN
        own = {"0.norm.weight": norm}
        own |= {f"0.{name}": tensor for name, tensor in block.items()}
    tensors |= own
    return {name: tensors[name].clone() for name in shapes}


def _shallow(kind: Kind, target: TargetStates) -> dict[str, torch.Tensor]:
    """The target's layers; the one that copies as the last, made small, with a norm that changes nothing."""
    tensors = {"model.norm.weight": _read(target, "model.norm.weight")}
    num_target = target.config.num_layers
    for index, source in enumerate(source_layers(num_target, kind.config.block.num_layers)):
        for name in within(dict.fromkeys(kind.config.shapes(), torch.empty(0)), f"model.layers.{index}."):
            tensor = _read(target, f"model.layers.{num_target - 1 if source is None else source}.{name}")
            if source is None and name == "input_layernorm.weight":
                tensor = torch.ones_like(tensor)
            tensors[f"model.layers.{index}.{name}"] = tensor
    return tensors


def _block(kind: Kind, target: TargetStates, scale: float) -> dict[str, torch.Tensor]:
    """The target's last layer as a head's: key heads repeated, without what `fitting` finds."""
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
    if kind.algorithm == EAGLE3:  # these read two rows side by side
        block = {name: tensor for name, tensor in block.items() if name not in _READING}
    return _known(kind, block)


def _known(kind: Kind, block: Tensors) -> dict[str, torch.Tensor]:
    """Without biases and norms that a head's layer does not have."""
    suffixes = tuple(name.partition("layers.0." if kind.algorithm != NEXTN else "0.")[2] for name in kind.shapes(1))
    return {name: tensor for name, tensor in block.items() if name in suffixes or name == "input_layernorm.weight"}


def _read(target: TargetStates, name: str) -> torch.Tensor:
    return tensor_of(target.folder, name, target.load_format).float()
