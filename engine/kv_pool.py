"""The paged pool's tensors: keys, values and features of every slot, allocated once."""

from __future__ import annotations

import math

import numpy as np
import torch

from engine.config import ModelConfig
from engine.feature_spec import FeatureSpec
from kernels.attention.pool import FP8
from kernels.native.memory import HUGE_PAGE, huge_zeros
from kernels.transfer import to_device
from outrider.errors import StartupError


def kv_dtype(name: str, compute: torch.dtype) -> torch.dtype:
    """The dtype of kept keys and values by `--kv-cache-dtype`, where auto is the dtype computed with."""
    if name == "auto":
        return compute
    if name not in FP8:
        raise StartupError(f"--kv-cache-dtype is {name!r}; it must be auto or {' or '.join(FP8)}")
    return FP8[name]


class KVPool:
    """Keys and values of all layers, and the feature plane beside them.

    k, v: [num_layers, num_slots, num_kv_heads, head_dim] in `kv` or else `dtype`; features: [num_slots, width] in
    `dtype`, or None when none are kept. `with_padding`: one slot more, the last, for rows that only fill a step up.
    """

    def __init__(
        self, config: ModelConfig, features: FeatureSpec, num_slots: int, dtype: torch.dtype, device: torch.device, *,
        kv: torch.dtype | None = None, with_padding: bool = False,
    ) -> None:  # fmt: skip
        self.num_slots = num_slots
        slots = num_slots + with_padding
        shape = (config.num_layers, slots, config.num_kv_heads, config.head_dim)
        # Zeros, so that a slot never written holds no NaN: a masked key is multiplied by 0, not skipped.
        self.k = _zeros(shape, kv or dtype, device)
        self.v = _zeros(shape, kv or dtype, device)
        width = features.width(config)
        self.features = _zeros((1, slots, width), dtype, device)[0] if width else None

    @torch.inference_mode()
    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copies KV and features of slots `source` (int32 [n]) to `target` (int32 [n]), as if all at once."""
        planes = [self.k, self.v] + ([self.features[None]] if self.features is not None else [])
        origin, goal = (to_device(slots.astype(np.int64), self.k.device) for slots in (source, target))
        for plane in planes:
            numbers = plane.view(torch.uint8) if plane.dtype.itemsize == 1 else plane
            numbers[:, goal] = numbers[:, origin]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, [num_layers, num_slots, ...]; on CPU, memory that the system gives page by page as it is written.

    torch would write its zeros at once and so take all of the pool's memory at start; and slots of one session may lie
    all over the pool, where with small pages every key read is also a walk through the page tables.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_layers, *plane = shape
    stride = layer_stride(num_layers, math.prod(plane) * dtype.itemsize)
    planes = huge_zeros(num_layers * stride).view(dtype).view(num_layers, -1)
    return planes[:, : math.prod(plane)].unflatten(1, plane)


def layer_stride(num_layers: int, size: int) -> int:
    """Bytes from one layer's plane of `size` bytes to the next one's.

    A step writes the same slots of all layers. Were all planes to begin at the same place of a huge page, one step
    in thousands would take a new page for each of them, which costs a tenth of a second and more. An odd number of
    2**n-ths of a page, at least one for each layer, gives every layer a place of its own.
    """
    if size < HUGE_PAGE:
        return size
    part = HUGE_PAGE >> (num_layers - 1).bit_length()
    parts = -(-size // part)
    return (parts | 1) * part
