"""Whether the memory that a drafter may come to take is there at all; it takes it as sessions come."""

from __future__ import annotations

import torch

from engine.config import ModelConfig
from engine.memory import GIB, device_memory
from outrider.args import DraftArgs
from outrider.errors import StartupError

ROWS_PER_SESSION = 3  # of the slot table: its own, and forks while drafting ahead


def check_pool(args: DraftArgs, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """StartupError where --draft-max-total-tokens is more than the memory holds, were nothing else in it."""
    angles = 2 * config.head_dim * dtype.itemsize
    token, total = config.kv_bytes_per_token(dtype.itemsize) + angles, device_memory(device).total
    if args.draft_max_total_tokens * token > total:
        raise StartupError(
            f"--draft-max-total-tokens is {args.draft_max_total_tokens}, of {token} bytes each, and "
            f"{total // token} fit into {total / GIB:.2f} GiB"
        )
