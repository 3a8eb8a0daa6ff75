"""How a model's steps are computed, where flags leave a choice: kernels, numbers kept, graphs, compiling."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.attention import AttentionChoice


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """The steps that graphs are captured for: up to so many sessions, of up to so many rows each."""

    max_batch: int
    max_rows: int
    last_logits: int = 0
    """Rows of each session, the last ones, whose logits longer steps give: a drafter wants no others; 0: all rows."""
    required: bool = False
    """Whether a model that cannot have graphs is refused, rather than run without."""


@dataclass(frozen=True, slots=True)
class Execution:
    """The defaults are what suits the device."""

    attention: AttentionChoice = field(default_factory=AttentionChoice)
    kv_cache_dtype: str = "auto"
    page_size: int = 1
    """Positions that lie side by side in the pool: attention reads whole pages."""
    graphs: GraphSizes | None = None
    """None: no graphs."""
    compile_max_batch: int = 0
    """Steps of at most so many sessions run layers compiled by torch.compile; 0: none do."""
