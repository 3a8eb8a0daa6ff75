"""From flags to a loaded model: its sizes, its runner, and what a step of it costs."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np

from engine.attention import AttentionChoice
from engine.batch import Segment
from engine.config import ModelConfig
from engine.execution import Execution, GraphSizes
from engine.feature_spec import FeatureSpec
from engine.model_folder import resolve_model
from engine.runner import ModelRunner, model_shapes
from engine.threads import share_cores
from outrider.args import VerifyArgs
from outrider.cost_table import CostTable
from outrider.out_of_memory import memory_for
from outrider.placement import Placement
from outrider.telemetry import get_logger
from outrider.text_files import vocab_fingerprint
from verify_service.device_sampler import DeviceSampler
from verify_service.sizing import Sizes, choose_sizes, graph_sessions

log = get_logger(__name__)

_WARM_UP_ROWS = (1, 2, 4, 8, 12, 16, 24, 32)
_WARM_UP_REPEATS = 5


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model with what was measured and chosen for it."""

    runner: ModelRunner
    sizes: Sizes
    costs: CostTable
    fingerprint: str
    placement: Placement = field(default_factory=lambda: Placement(None))


def load_model(args: VerifyArgs) -> LoadedModel:
    """Loads and warms the model up. StartupError when it cannot be served."""
    placement = Placement(args.core)  # first: a large model takes minutes
    folder = resolve_model(
        args.model_path, revision=args.revision, load_format=args.load_format, trust_remote_code=args.trust_remote_code
    )
    found = ModelConfig.from_folder(folder, trust_remote_code=args.trust_remote_code)
    config = found.for_context(args.context_length)
    sizes = choose_sizes(args, config, model_shapes(folder, config, load_format=args.load_format))
    wanted = (
        f"--max-total-tokens {sizes.total_tokens}, --max-running-requests {args.max_running_requests}, "
        f"--max-verify-nodes {args.max_verify_nodes}, --chunked-prefill-size {sizes.chunk}, "
        f"--context-length {sizes.context_length}"
    )
    with memory_for(wanted):
        runner = ModelRunner.load(
            folder,
            dtype=args.dtype,
            device=args.device,
            num_slots=sizes.total_tokens,
            max_sessions=args.max_running_requests,
            max_len=sizes.context_length,
            context_length=args.context_length,
            features=FeatureSpec.parse(args.features),
            load_format=args.load_format,
            max_batch_tokens=_most_rows(args, sizes),
            threads=args.threads,
            quantization=args.quantization,
            trust_remote_code=args.trust_remote_code,
            execution=execution_of(args),
        )
        share_cores(args.threads, by_kernels=runner.uses_kernels)
        if runner.device.type == "cuda":
            DeviceSampler(runner.device).warm_up(config.vocab_size, args.max_verify_nodes)
        costs = measure_costs(runner, min(sizes.context_length, _most_rows(args, sizes)))
    log.info(
        "model loaded", path=str(folder), kernels=runner.backend, tokens=sizes.total_tokens,
        step_ms=round(costs.ms(1), 2),
    )  # fmt: skip
    return LoadedModel(runner, sizes, costs, vocab_fingerprint(folder), placement)


def _most_rows(args: VerifyArgs, sizes: Sizes) -> int:
    """The most rows that a step may have."""
    return args.max_running_requests * (args.max_verify_nodes + 1) + sizes.chunk


def execution_of(args: VerifyArgs) -> Execution:
    """How steps are to be computed, by the flags."""
    graphs = None
    if not args.disable_cuda_graph:
        required = args.cuda_graph_max_bs is not None
        graphs = GraphSizes(graph_sessions(args), args.max_verify_nodes + 1, required=required)
    return Execution(
        attention=AttentionChoice(
            args.attention_backend,
            args.prefill_attention_backend,
            args.decode_attention_backend,
            args.speculative_attention_mode,
        ),
        kv_cache_dtype=args.kv_cache_dtype,
        page_size=args.page_size,
        graphs=graphs,
        compile_max_batch=args.torch_compile_max_bs if args.enable_torch_compile else 0,
    )


def measure_costs(runner: ModelRunner, most_rows: int) -> CostTable:
    """Times steps of a few sizes on slots that nobody uses yet; the first of each size warms it up.

    The sizes take turns: a slow moment of the machine must not make one of them look dear, which nobody would try then.
    """
    measured: dict[int, float] = {}
    for _ in range(_WARM_UP_REPEATS):
        for rows in (rows for rows in _WARM_UP_ROWS if rows <= most_rows):
            slots = np.arange(rows, dtype=np.int32)
            segment = Segment(0, 0, np.zeros(rows, np.int32), slots, num_logits=rows)
            start = time.perf_counter()
            runner.forward([segment]).argmax(-1).tolist()
            measured[rows] = min(measured.get(rows, math.inf), (time.perf_counter() - start) * 1000)
    return CostTable(measured)
