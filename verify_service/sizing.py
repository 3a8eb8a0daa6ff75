"""How many tokens the pool holds, how long a session may be, how much prompt one step computes."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from engine.config import FeatureSpec, ModelConfig
from engine.loader import compute_dtype
from engine.runner import pick_device
from outrider.args import VerifyArgs
from outrider.errors import StartupError

_CPU_MEMORY_SHARE = 0.25  # of the memory that is free at start
_GPU_MEMORY_SHARE = 0.85  # of the device's free memory that is left beside the weights
_CHUNK = {"cpu": 256, "cuda": 2048}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of tokens."""

    total_tokens: int
    context_length: int
    chunk: int


def choose_sizes(args: VerifyArgs, config: ModelConfig) -> Sizes:
    """What the flags say, or what memory allows. A session always fits the pool whole."""
    context = args.context_length or config.max_position
    if context > config.max_position:
        raise StartupError(f"--context-length is {context}; the model's own is {config.max_position}")
    device = pick_device(args.device)
    total = args.max_total_tokens
    if total is None:
        itemsize = compute_dtype(args.dtype, config).itemsize
        per_token = config.kv_bytes_per_token(itemsize) + FeatureSpec.parse(args.features).width(config) * itemsize
        total = min(args.max_running_requests * context, _free_bytes(device) // per_token)
        if total < min(context, 1024):
            raise StartupError(f"free memory holds {total} tokens of KV; set --max-total-tokens or --context-length")
    page_size = args.page_size
    total -= total % page_size
    return Sizes(total, min(context, total), args.chunked_prefill_size or _CHUNK[device.type])


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _GPU_MEMORY_SHARE)
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _CPU_MEMORY_SHARE)
