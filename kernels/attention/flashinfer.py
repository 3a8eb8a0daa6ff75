"""Tree attention by FlashInfer's paged wrappers; same signature as the reference. Optional, and not measured yet.

It has run against stand-ins for FlashInfer's classes only, never on a GPU. Every slot is a page of its own to it, so
any page size of the pool will do, and a tree's rows may lie anywhere. A step of single rows goes to the decode
wrapper, any other to the prefill wrapper, with a mask over all keys as soon as one segment is a tree.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

from kernels.attention.layout import AttentionLayout

# What FlashInfer's documentation asks for; it holds the parts of long contexts.
_WORKSPACE_BYTES = 128 << 20


def load_flashinfer(device: torch.device) -> ModuleType:
    """The package. ImportError where it is not installed, ValueError where `device` is no CUDA device that is there."""
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ValueError(f"attention backend flashinfer needs a CUDA device; this one is {device}")
    return importlib.import_module("flashinfer")


class FlashInferAttention:
    """Attention for one model on one device; `library` is the module flashinfer."""

    def __init__(self, device: torch.device, library: Any) -> None:
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._decode = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        self._prefill = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self._layout: AttentionLayout | None = None
        self._settings: tuple[object, ...] = ()

    def __call__(
        self, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, layout: AttentionLayout, scale: float, *,
        soft_cap: float = 0.0, window: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        """As kernels.attention.triton.TritonAttention.__call__, for q in float16 or bfloat16."""
        if q.dtype not in {torch.float16, torch.bfloat16}:
            raise ValueError(f"FlashInfer has no kernels for {q.dtype}")
        settings = (q.shape[1:], q.dtype, k_pool.shape[1], k_pool.dtype, scale, soft_cap, window)
        if layout is not self._layout or settings != self._settings:
            self._plan(q, k_pool, layout, scale, soft_cap, window)
            self._layout, self._settings = layout, settings
        wrapper = self._decode if _is_decode(layout) else self._prefill
        return wrapper.run(q, (k_pool[:, None], v_pool[:, None]))

    def _plan(
        self, q: torch.Tensor, k_pool: torch.Tensor, layout: AttentionLayout, scale: float, soft_cap: float, window: int
    ) -> None:
        segments = layout.plan(q.device)
        lens = torch.tensor([len(segment.slots) for segment in segments], dtype=torch.int32)
        pages = (_ends(lens), torch.cat([segment.slots for segment in segments]), torch.ones_like(lens))
        sizes = (q.shape[1], k_pool.shape[1], q.shape[2], 1)
        options: dict[str, Any] = {
            "sm_scale": scale, "logits_soft_cap": soft_cap or None, "window_left": window - 1 if window else -1,
            "q_data_type": q.dtype, "kv_data_type": k_pool.dtype,
        }  # fmt: skip
        if _is_decode(layout):
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


def _ends(counts: torch.Tensor) -> torch.Tensor:
    """int32 [n + 1]: 0 and the running sums."""
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


def _mask(layout: AttentionLayout, device: torch.device, window: int) -> torch.Tensor:
    """bool: every segment's [n, prefix_len + n], one behind another."""
    positions = torch.from_numpy(layout.positions).to(device)
    masks = []
    for segment, prefix_len in zip(layout.plan(device), layout.prefix_lens.tolist(), strict=True):
        own = positions[segment.rows]
        keys = torch.cat([torch.arange(prefix_len, device=device), own])
        near = own[:, None] - keys[None, :] < window if window else True
        masks.append((segment.visible & near).flatten())
    return torch.cat(masks)
