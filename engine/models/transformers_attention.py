"""What transformers' models call instead of their own attention: keys and values go to our pool, rows see their tree.

transformers' layers hand over queries, keys and values of the step's flat rows, already rotated; what they want of a
window or a soft cap comes as arguments.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from engine.attention import Attention
from engine.kv_pool import KVPool
from kernels.attention.layout import AttentionLayout
from kernels.attention.pool import store
from outrider.errors import StartupError

# The name under which transformers' registry has it. No `|` and no `/`: those have meanings there.
NAME = "outrider"
# What layers pass besides that does not change what is computed here.
_HARMLESS = frozenset({"position_ids", "cache_position", "position_embeddings"})


class PagedAttention:
    """One model's attention over a pool. `layout` and `slots` are of the step that runs."""

    def __init__(self, architecture: str, pool: KVPool, attention: Attention, windows: tuple[int, ...]) -> None:
        self.architecture = architecture
        self.layout: AttentionLayout | None = None
        self.slots = torch.empty(0, dtype=torch.int64)
        self.seen: list[int] = []
        """Layers that have called since the step began."""
        self._pool = pool
        self._attention = attention
        self._windows = windows

    def begin(self, layout: AttentionLayout, slots: torch.Tensor) -> None:
        """Before a step's forward pass; slots int64 [T]."""
        self.layout, self.slots = layout, slots
        self.seen.clear()

    def __call__(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None,
        sliding_window: int | None, soft_cap: float | None,
    ) -> torch.Tensor:  # fmt: skip
        """q [1, heads, T, d], k and v [1, kv_heads, T, d] -> [1, T, heads, d]."""
        if self.layout is None:
            raise RuntimeError("no step runs")
        layer = module.layer_idx
        self._check(layer, k, v)
        self.seen.append(layer)
        rows, keys, values = (part[0].transpose(0, 1).contiguous() for part in (q, k, v))
        store(self._pool.k[layer], self.slots, keys)
        store(self._pool.v[layer], self.slots, values)
        window = sliding_window or (self._windows[layer] if self._windows else 0)
        scale = rows.shape[-1] ** -0.5 if scaling is None else scaling
        mixed = self._attention(
            rows, self._pool.k[layer], self._pool.v[layer], self.layout, scale, soft_cap=soft_cap or 0.0, window=window
        )
        return mixed[None]

    def _check(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        wanted = tuple(self._pool.k.shape[2:])
        for name, part in (("keys", k), ("values", v)):
            found = (part.shape[1], part.shape[3])
            if found != wanted or part.shape[2] != len(self.slots):
                refuse(
                    self.architecture,
                    f"layer {layer} has {name} of {found[0]} heads of {found[1]} for {part.shape[2]} of "
                    f"{len(self.slots)} rows; {wanted[0]} heads of {wanted[1]} in every layer are served",
                )


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
    softcap: float | None = None, **others: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """The function in transformers' registry. StartupError for a layer that wants something else than attention."""
    paged: PagedAttention = module.outrider_attention
    # transformers makes no mask for an attention that its masks do not know: one that comes is the layer's own.
    handed = others | {"attention_mask": attention_mask}
    strange = [name for name, item in handed.items() if isinstance(item, torch.Tensor) and name not in _HARMLESS]
    if strange:
        refuse(paged.architecture, f"layer {module.layer_idx} hands {', '.join(strange)} to its attention")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        refuse(paged.architecture, f"layer {module.layer_idx} looks ahead")
    return paged(module, query, key, value, scaling, sliding_window, softcap), None


def refuse(architecture: str, reason: str) -> NoReturn:
    """StartupError: the model's attention is not what the pool can serve."""
    raise StartupError(f"the attention of {architecture} is not supported: {reason}")
