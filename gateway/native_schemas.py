"""What SGLang's routes answer, as types."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class GenerateResult(Struct):
    """One output of /generate. `meta_info` has counts, the reason of the end, and log-probabilities where asked."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]


class ModelInfoReport(Struct):
    """GET /get_model_info. `preferred_sampling_params` stand for what a request leaves out."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    served_model_name: str
    architectures: list[str]
    vocab_size: int
    context_length: int
    dtype: str
    quantization: str | None
    preferred_sampling_params: dict[str, float] | None


class InternalState(Struct):
    """One verify service."""

    avg_spec_accept_length: float
    spec_verify_ct: int
    spec_num_proposed_drafts: int
    spec_num_correct_drafts: int
    last_gen_throughput: float
    memory_usage: dict[str, int]
    effective_max_running_requests_per_dp: int
    num_running_reqs: int
    num_queue_reqs: int
    free_pages: int
    total_pages: int
    preemptions: int
    boot_id: str
    numerics_id: str
    drafters: list[dict[str, Any]]


class ServerReport(Struct):
    """GET /server_info: beside these, every setting of the verify service under its own name."""

    model_path: str
    served_model_name: str
    sampling_defaults: str
    version: str
    internal_states: list[InternalState]


class SpeculativeLoad(Struct):
    """What drafts gave since the start: tokens of a verify step, and the accepted share of what was drafted."""

    accept_length: float
    accept_rate: float


class Load(Struct):
    """What one verify service has to do. `token_usage` is the share of its KV pool that is in use."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    token_usage: float
    max_total_num_tokens: int
    max_running_requests: int
    gen_throughput: float
    speculative: SpeculativeLoad


class LoadReport(Struct):
    """GET /v1/loads: one for each verify service."""

    version: str
    loads: list[Load]


class FlushReport(Struct):
    """POST /flush_cache."""

    success: bool
    freed_pages: int


class VersionReport(Struct):
    """GET /version."""

    version: str
