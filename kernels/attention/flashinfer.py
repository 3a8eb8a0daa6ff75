"""Tree attention by FlashInfer's paged wrappers; same signature as the reference. Optional, and not measured yet.

It has run against stand-ins for FlashInfer's classes only, never on a GPU. Every slot is a page of its own to it, so
any page size of the pool will do, and a tree's rows may lie anywhere. A step of single rows goes to the decode
wrapper, any other to the prefill wrapper, with a mask over all keys as soon as one segment is a tree; or, with
`alone`, each row goes to the decode wrapper with the keys that it sees, and no mask is needed.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import numpy as np
import torch

from kernels.attention.layout import AttentionLayout
from kernels.transfer import to_device

# What FlashInfer's documentation asks for; it holds the parts of long contexts.
_WORKSPACE_BYTES = 128 << 20


def load_flashinfer(device: torch.device) -> ModuleType:
    """The package. ImportError where it is not installed, ValueError where `device` is no CUDA device that is there."""
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ValueError(f"flashinfer needs a CUDA device; this one is {device}")
    return importlib.import_module("flashinfer")


class FlashInferAttention:
    """Attention for one model on one device; `library` is the module flashinfer; `alone`: rows go one by one."""

    def __init__(self, device: torch.device, library: Any, *, alone: bool = False) -> None:
        self._alone = alone
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._decode = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        self._prefill = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self._layout: AttentionLayout | None = None
        self._settings: tuple[object, ...] = ()

    def __call__(
        self, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, layout: AttentionLayout, scale: float, *,
        soft_cap: float = 0.0, window: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        """Computes what TritonAttention (kernels.attention.triton) does, for q in float16 or bfloat16."""
        if q.dtype not in {torch.float16, torch.bfloat16}:
            raise ValueError(f"FlashInfer has no kernels for {q.dtype}")
        settings = (q.shape[1:], q.dtype, k_pool.shape[1], k_pool.dtype, scale, soft_cap, window)
        if layout is not self._layout or settings != self._settings:
            self._plan(q, k_pool, layout, scale, soft_cap, window)
            self._layout, self._settings = layout, settings
        wrapper = self._decode if self._alone or _is_decode(layout) else self._prefill
        return wrapper.run(q, (k_pool[:, None], v_pool[:, None]))

    def _plan(
        self, q: torch.Tensor, k_pool: torch.Tensor, layout: AttentionLayout, scale: float, soft_cap: float, window: int
    ) -> None:
        keys = _keys_by_row(layout) if self._alone else _keys_by_segment(layout)
        lens = torch.tensor([len(slots) for slots in keys], dtype=torch.int32)
        pages = (_ends(lens), to_device(np.concatenate(keys), q.device), torch.ones_like(lens))
        sizes = (q.shape[1], k_pool.shape[1], q.shape[2], 1)
        options: dict[str, Any] = {
            "sm_scale": scale, "logits_soft_cap": soft_cap or None, "window_left": window - 1 if window else -1,
            "q_data_type": q.dtype, "kv_data_type": k_pool.dtype,
        }  # fmt: skip
        if self._alone or _is_decode(layout):
            self._decode.plan(*pages, *sizes, **options)
            return
        if (layout.mask_starts >= 0).any():
            # Its own window counts keys, where a tree's rows go by depth: the mask holds the window then.
            options |= {"custom_mask": _mask(layout, q.device, window), "window_left": -1}
        else:
            options["causal"] = True
        self._prefill.plan(_ends(torch.from_numpy(layout.num_rows)), *pages, *sizes, **options)


def _is_decode(layout: AttentionLayout) -> bool:
    return bool((layout.num_rows == 1).all())


def _keys_by_segment(layout: AttentionLayout) -> list[np.ndarray]:
    """int32: the slots of each segment's prefix and rows."""
    spans = zip(layout.table_rows, layout.prefix_lens, layout.first_rows, layout.num_rows, strict=True)
    return [
        np.concatenate([layout.slot_table[table_row, :prefix_len], layout.slots[first : first + count]])
        for table_row, prefix_len, first, count in spans
    ]


def _keys_by_row(layout: AttentionLayout) -> list[np.ndarray]:
    """int32: the slots that each row sees, by position, since a path's rows stand in the order of their depth."""
    keys: list[np.ndarray] = []
    for segment, slots in enumerate(_keys_by_segment(layout)):
        count, prefix_len = int(layout.num_rows[segment]), int(layout.prefix_lens[segment])
        start = int(layout.mask_starts[segment])
        inside = np.tri(count, dtype=np.bool_)
        if start >= 0:
            inside = layout.masks[start : start + count * count].reshape(count, count)
        keys += [np.concatenate([slots[:prefix_len], slots[prefix_len:][seen]]) for seen in inside]
    return keys


def _ends(counts: torch.Tensor) -> torch.Tensor:
    """int32 [n + 1]: 0 and the running sums."""
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


def _mask(layout: AttentionLayout, device: torch.device, window: int) -> torch.Tensor:
    """bool: every segment's [n, prefix_len + n], one behind another."""
    return torch.cat([segment.seen(window).flatten() for segment in layout.plan(device)])
