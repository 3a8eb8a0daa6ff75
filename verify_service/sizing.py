"""How many tokens the pool holds, how long a session may be, how much prompt one step computes.

Memory is shared out as SGLang does it: --mem-fraction-static of what is free at start goes to weights and pool
together, the rest is head-room for activations, graphs and the drafter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.config import ModelConfig
from engine.devices import pick_device
from engine.feature_spec import FeatureSpec
from engine.kv_pool import kv_dtype
from engine.loader import compute_dtype
from engine.memory import GIB, Memory, device_memory, weight_bytes
from engine.quantization import check_quantization
from outrider.args import HEAD_ALGORITHMS, VerifyArgs
from outrider.errors import StartupError
from outrider.telemetry import get_logger

log = get_logger(__name__)

# Of a CPU's free memory: what the pool takes by itself at most, for other things run there too; and all of it together.
_CPU_POOL_SHARE = 0.25
_CPU_LARGEST_SHARE = 0.85
_SMALLEST_SHARE = 0.5
_MIB = 2**20
# And what is left of it at least, however little there is: what serving adds (scratch of a step, gRPC, the interpreter)
# does not shrink with it. The embedded model took up to 80 MiB for 8 to 24 requests; as much again is for the kernel's
# own, and larger steps.
_CPU_HEAD_ROOM = 160 * _MIB
# SGLang's rule for GPUs, in MiB: for the runtime, for each token of a chunk and each session of a graph, at least so
# much on a large GPU; and for a draft model beside the target (none for NGRAM).
_BASE_MIB, _PER_CHUNK_TOKEN, _LEAST_CHUNK, _PER_GRAPH_SESSION, _PER_RANK = 512, 1.5, 2048, 2, 128
_LARGE_GPU_MIB, _LARGE_GPU_LEAST_MIB = 60 * 1024, 10 * 1024
_DRAFTER_MIB = {"STANDALONE": 6 * 1024, **dict.fromkeys(HEAD_ALGORITHMS, 4 * 1024)}
_GRAPH_SESSIONS = 160  # SGLang's most
# Rows that are drawn at once on a GPU, whose weights lie there in float64 (kernels/sampling_triton.py).
_DRAWN_ROWS, _DRAWN_BYTES = 128, 8
# A pool smaller than this serves nobody.
_LEAST_TOKENS = 1024
_CHUNK = {"cpu": 256, "cuda": 2048}
# Of what waits for a drafter: four rounds of every session, each of so many rows as a step commits at most, mostly.
_LEAST_OUTBOX, _LARGEST_OUTBOX, _ROWS_A_SESSION = 8 * 2**20, 256 * 2**20, 4 * 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of tokens."""

    total_tokens: int
    context_length: int
    chunk: int


def outbox_bytes(args: VerifyArgs, row_bytes: int) -> int:
    """Bytes that may wait for one drafter, as the flag says, or as rows of so many bytes need it."""
    if args.drafter_outbox_bytes is not None:
        return args.drafter_outbox_bytes
    return min(max(_LEAST_OUTBOX, _ROWS_A_SESSION * args.max_running_requests * row_bytes), _LARGEST_OUTBOX)


def choose_sizes(
    args: VerifyArgs, config: ModelConfig, shapes: dict[str, tuple[int, ...]], *, memory: Memory | None = None
) -> Sizes:
    """What the flags say, or what memory allows. A session always fits the pool whole.

    shapes: of the model's tensors; memory: of the device, for tests. StartupError, with the numbers, for a pool that
    does not fit.
    """
    context = args.context_length or config.max_position
    if context > config.max_position:
        longest, rope = max(config.max_position, config.long_position), config.changing_rope
        has_more = rope is not None and not config.long_position
        why = f": its `{rope}` rope scaling beyond {longest} positions is not supported" if has_more else ""
        raise StartupError(f"--context-length is {context}; it must be at most the model's own, {longest}{why}")
    if context < config.long_position and args.context_length is None:
        log.warning(
            "context cut: with --context-length there are the rotary factors of a longer one", tokens=context,
            most=config.long_position,
        )  # fmt: skip
    device = pick_device(args.device)
    chunk = args.chunked_prefill_size or _CHUNK[device.type]
    budget = _budget(args, config, shapes, chunk, device, memory or device_memory(device))
    total = args.max_total_tokens
    if total is None:
        total = min(args.max_running_requests * context, budget.tokens)
        if total < min(context, _LEAST_TOKENS):
            raise StartupError(f"no room for the KV pool: {budget}; {_advice(args)}")
    elif total > budget.most_tokens:
        raise StartupError(
            f"--max-total-tokens is {total}, of {budget.token_bytes} bytes each, and {budget.most_tokens} fit: {budget}"
        )
    if total < args.page_size:
        raise StartupError(
            f"--max-total-tokens is {total}; it must be at least a page, --page-size, which is {args.page_size}"
        )
    total -= total % args.page_size
    if total < context:
        log.warning("context cut to what the KV pool holds", tokens=total, of=context)
    return Sizes(total, min(context, total), chunk)


@dataclass(frozen=True, slots=True)
class _Budget:
    memory: Memory
    weights: int
    token_bytes: int
    fraction: float

    @property
    def tokens(self) -> int:
        """What --mem-fraction-static leaves for the pool."""
        return max(0, int(self.memory.free * self.fraction) - self.weights) // self.token_bytes

    @property
    def most_tokens(self) -> int:
        """What there is memory for at all."""
        return max(0, self.memory.free - self.weights) // self.token_bytes

    def __str__(self) -> str:
        free, total, weights = (f"{size / GIB:.2f} GiB" for size in (*self.memory, self.weights))
        fraction = f"{self.fraction:.3f}" if round(self.fraction, 3) else f"{self.fraction}"
        return (
            f"{free} of {total} are free, weights take {weights}, --mem-fraction-static is {fraction}, which "
            f"leaves {self.tokens} tokens of {self.token_bytes} bytes"
        )


def _budget(
    args: VerifyArgs, config: ModelConfig, shapes: dict[str, tuple[int, ...]], chunk: int, device: torch.device,
    memory: Memory,
) -> _Budget:  # fmt: skip
    compute = compute_dtype(args.dtype, config)
    kept = kv_dtype(args.kv_cache_dtype, compute).itemsize
    token = config.kv_bytes_per_token(kept) + FeatureSpec.parse(args.features).width(config) * compute.itemsize
    weights = weight_bytes(shapes, compute.itemsize, check_quantization(args.quantization, device))
    fraction = args.mem_fraction_static
    if fraction is None:
        fraction = (
            _cpu_fraction(weights, memory)
            if device.type == "cpu"
            else gpu_fraction(args, chunk, memory.total, logits_bytes(args, config.vocab_size, compute.itemsize))
        )
    return _Budget(memory, weights, token, fraction)


def _cpu_fraction(weights: int, memory: Memory) -> float:
    free = max(memory.free, 1)
    return max(0.0, min(_CPU_LARGEST_SHARE, weights / free + _CPU_POOL_SHARE, 1 - _CPU_HEAD_ROOM / free))


def logits_bytes(args: VerifyArgs, vocab_size: int, itemsize: int) -> int:
    """What logits of the largest verification take on a GPU, as they come and in fp32, and drawing from them.

    Where nothing is to be drafted, a session has one row. A prompt's rows, of which only prompt_logprobs want logits,
    are not in it: SGLang's rule has room for them.
    """
    drafts = (args.speculative_algorithm or "").upper() != "NONE"
    rows = args.max_running_requests * (drafts * args.max_verify_nodes + 1)
    number = 4 if itemsize == 4 else itemsize + 4
    return vocab_size * (rows * number + min(rows, _DRAWN_ROWS) * _DRAWN_BYTES)


def gpu_fraction(args: VerifyArgs, chunk: int, total_bytes: int, logits: int) -> float:
    """SGLang's automatic --mem-fraction-static on a GPU of so many bytes, and room for so many of `logits`, which trees
    of many sessions have more of than its rule reckons with."""
    total = total_bytes / _MIB
    reserved = _BASE_MIB + _PER_CHUNK_TOKEN * max(chunk, _LEAST_CHUNK) + _PER_RANK + logits / _MIB
    reserved += _PER_GRAPH_SESSION * graph_sessions(args)
    if total > _LARGE_GPU_MIB:
        reserved = max(reserved, _LARGE_GPU_LEAST_MIB)
    reserved += _DRAFTER_MIB.get((args.speculative_algorithm or "").upper(), 0)
    return max(_SMALLEST_SHARE, round((total - reserved) / total, 3))


def graph_sessions(args: VerifyArgs) -> int:
    """Sessions of the largest step that is captured as a CUDA graph."""
    return args.cuda_graph_max_bs or min(args.max_running_requests, _GRAPH_SESSIONS)


def _advice(args: VerifyArgs) -> str:
    if args.mem_fraction_static is not None:
        return "raise --mem-fraction-static or quantise (--quantization)"
    return "quantise (--quantization), free memory, or set --mem-fraction-static"
