"""The forms in which shipped weights are stored, and what they were before: int8, or 4 bits beside the target's.

A matrix is int8 [rows, columns] with `NAME.scale` fp32 [rows] or [rows, inputs]. One that training moved only a little
away from a matrix of the target is stored as the difference, uint8 [rows, columns / 2], two numbers of 4 bits in each,
with `NAME.scale` bf16 [rows]: half as large, and as near to what it was as int8 of the whole where that has moved by
some 7 %.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.checkpoint import Checkpoint

SCALE = ".scale"
JOINING = "fc.weight"
# Of its size: further away than this from every matrix of the target, one is stored by itself.
MOST_MOVED = 0.25
_LAYER = "model.layers."
_LARGEST = 7  # of 4 bits, with a sign

Tensors = Mapping[str, torch.Tensor]


def quantized(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Matrices as int8 with a scale for each row; vectors, maps and masks as they are.

    EAGLE's matrix that joins inputs as they are (`JOINING`) has a scale for each row and input: they differ in size,
    and so do the weights.
    """
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or not tensor.is_floating_point():
            packed[name] = tensor.contiguous()
            continue
        rows, columns = tensor.shape
        parts = columns // rows if name.endswith(JOINING) and columns % rows == 0 else 1
        wide = tensor.float().unflatten(1, (parts, -1))
        # A row of zeros keeps a scale of 1.
        largest = wide.abs().amax(dim=2)
        scale = torch.where(largest > 0, largest / 127, 1.0)
        packed[name] = (wide / scale[..., None]).round().clamp(-127, 127).to(torch.int8).flatten(1)
        packed[name + SCALE] = scale if parts > 1 else scale[:, 0]
    return packed


def dequantized(packed: Tensors) -> dict[str, torch.Tensor]:
    """The tensors of which `quantized` made `packed`, in bf16 again."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in packed.items():
        if name.endswith(SCALE) and name.removesuffix(SCALE) in packed:
            continue
        scale = packed.get(name + SCALE)
        if scale is None:
            tensors[name] = tensor
            continue
        parts = scale.reshape(len(scale), -1)
        wide = tensor.float().unflatten(1, (parts.shape[1], -1)) * parts[..., None]
        tensors[name] = wide.flatten(1).to(torch.bfloat16)
    return tensors


def difference(tensor: torch.Tensor, base: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, two in a byte, and a scale for each row, of `tensor` [rows, columns] less `base`; columns are even in
    number."""
    beyond = tensor.float() - base.float()
    largest = beyond.abs().amax(dim=1)
    scale = torch.where(largest > 0, largest / _LARGEST, 1.0).to(torch.bfloat16)
    codes = (beyond / scale.float()[:, None]).round().clamp(-_LARGEST, _LARGEST).to(torch.int8) + _LARGEST + 1
    low, high = codes.to(torch.uint8).unflatten(1, (-1, 2)).unbind(2)
    return low | (high << 4), scale


def moved(codes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The matrix [rows, columns] that `difference` was made of, in bf16; codes uint8 [rows, columns / 2]."""
    numbers = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1).float() - (_LARGEST + 1)
    return (base.float() + numbers * scale.float()[:, None]).to(torch.bfloat16)


def parents(tensors: Tensors, target: Checkpoint) -> dict[str, str]:
    """The target's tensor that each of a draft model's began as, by name: the same, or a matrix that is near it.

    A layer's may have been any layer's.
    """
    found: dict[str, str] = {}
    shapes = target.shapes()
    for name, tensor in tensors.items():
        index, _, rest = name.removeprefix(_LAYER).partition(".")
        names = [name]
        if name.startswith(_LAYER) and index.isdigit():
            names = [other for other in shapes if other.startswith(_LAYER) and other.endswith(f".{rest}")]
        near = {other: _distance(tensor, target.tensor(other)) for other in names if shapes.get(other) == tensor.shape}
        best = min(near, key=near.__getitem__, default=None)
        can_move = tensor.ndim == 2 and tensor.shape[1] % 2 == 0
        if best is not None and near[best] <= (MOST_MOVED if can_move else 0.0):
            found[name] = best
    return found


def _distance(tensor: torch.Tensor, other: torch.Tensor) -> float:
    """How far a tensor is from `other`, as a share of its size."""
    return float((tensor.float() - other.float()).norm() / tensor.float().norm().clamp(min=1e-30))
