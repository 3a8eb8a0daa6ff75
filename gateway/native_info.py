"""SGLang's routes about the server: /get_model_info, /get_server_info, /v1/loads, /flush_cache."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

import outrider
from gateway.errors import HttpError
from gateway.exchange import json_response
from gateway.native_schemas import (
    FlushReport,
    InternalState,
    Load,
    LoadReport,
    ModelInfoReport,
    SpeculativeLoad,
)
from gateway.replica import ServerInfo
from gateway.service import gateway_of
from outrider.algorithms import algorithm_name
from outrider.args import VerifyArgs
from outrider.errors import Unavailable


async def get_model_info(request: Request) -> ASGIApp:
    """SGLang's /get_model_info: `model_path` is the local folder that verify reads."""
    ready = gateway_of(request).ready()
    model = ready.served.model
    report = ModelInfoReport(
        model_path=model.model_path, tokenizer_path=str(ready.tokenizer_path), is_generation=True,
        served_model_name=ready.model_name, architectures=[model.architecture], vocab_size=model.vocab_size,
        context_length=ready.codec.context_length, dtype=model.dtype, quantization=model.quantization or None,
        preferred_sampling_params=dict(ready.sampling) or None,
    )  # fmt: skip
    return json_response(report)


async def get_server_info(request: Request) -> ASGIApp:
    """SGLang's /get_server_info: the verify service's settings, and a state for each replica that serves."""
    gateway = gateway_of(request)
    ready = gateway.ready()
    last = [info for _, info in gateway.replicas.infos]
    infos = await gateway.replicas.ask_all() or last
    return json_response(
        {
            **VerifyArgs.from_flags(infos[0].arguments),
            "model_path": infos[0].model.model_path,
            "served_model_name": ready.model_name,
            "sampling_defaults": gateway.args.sampling_defaults,
            "version": outrider.__version__,
            "internal_states": [_internal_state(info) for info in infos],
        }
    )


def _internal_state(info: ServerInfo) -> InternalState:
    stats, state = info.speculation, info.state
    return InternalState(
        avg_spec_accept_length=stats.committed_tokens / stats.verify_steps if stats.verify_steps else 0.0,
        spec_verify_ct=stats.verify_steps,
        spec_num_proposed_drafts=stats.draft_tokens,
        spec_num_correct_drafts=stats.accepted_tokens,
        last_gen_throughput=state.generation_tokens_per_s,
        memory_usage={"token_capacity": info.limits.max_total_tokens},
        effective_max_running_requests_per_dp=info.limits.max_running_requests,
        num_running_reqs=state.running_requests,
        num_queue_reqs=state.queued_requests,
        free_pages=state.free_pages,
        total_pages=state.total_pages,
        preemptions=state.preemptions,
        boot_id=info.boot_id,
        numerics_id=info.model.numerics_id,
        drafters=[
            {
                "drafter_id": drafter.drafter_id,
                "algorithm": algorithm_name(drafter.algorithm),
                "draft_model": drafter.draft_model,
                "sessions": drafter.sessions,
                "proposals": dict(drafter.proposals),
            }
            for drafter in info.drafters
        ],
    )


async def get_loads(request: Request) -> ASGIApp:
    """SGLang's /v1/loads, of what replicas last said, for who asks often: an address has the place of SGLang's rank."""
    replicas = gateway_of(request).replicas
    last = dict(replicas.infos)
    if not last:
        raise Unavailable("No verify service is available.")
    ranks = [address for address, _ in replicas.states]
    loads = [_load(rank, last[address]) for rank, address in enumerate(ranks) if address in last]
    return json_response(LoadReport(outrider.__version__, loads))


def _load(rank: int, info: ServerInfo) -> Load:
    stats, state, limits = info.speculation, info.state, info.limits
    return Load(
        dp_rank=rank,
        num_running_reqs=state.running_requests,
        num_waiting_reqs=state.queued_requests,
        token_usage=1 - state.free_pages / state.total_pages if state.total_pages else 0.0,
        max_total_num_tokens=limits.max_total_tokens,
        max_running_requests=limits.max_running_requests,
        gen_throughput=state.generation_tokens_per_s,
        speculative=SpeculativeLoad(
            accept_length=stats.committed_tokens / max(stats.verify_steps, 1),
            accept_rate=stats.accepted_tokens / max(stats.draft_tokens, 1),
        ),
    )


async def flush_cache(request: Request) -> ASGIApp:
    """SGLang's /flush_cache: every verify service that serves empties its prefix cache.

    A browser may send this for any page without asking us first, and names the page's origin with it.
    """
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
        raise HttpError(403, "A page of another origin may not empty the caches.", code="forbidden")
    gateway = gateway_of(request)
    gateway.ready()
    freed = await gateway.replicas.flush_caches()
    return json_response(FlushReport(success=True, freed_pages=freed))
