"""SGLang's native routes, as its clients and benchmarks read them: /generate, /get_model_info, /get_server_info."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

import outrider
from gateway.answer import Answer, Collected, collect, numbered
from gateway.completions import as_prompts, encode_prompts
from gateway.constraints import of_sglang
from gateway.exchange import event_stream, json_response, request_id, until_disconnect
from gateway.plan import Prompt, check_total, make_plan, refuse_unsupported
from gateway.replicas import ServerInfo
from gateway.responses import DONE
from gateway.schemas import GenerateRequest, SamplingFields, SglangSampling
from gateway.service import Ready, gateway_of
from gateway.text_stream import SpeculationCount
from outrider.errors import InvalidArgument
from outrider.v1 import common_pb2

DEFAULT_MAX_NEW_TOKENS = 128
_RENAMED = {"max_new_tokens": None, "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_GRAMMARS = ("json_schema", "regex", "ebnf")


async def generate(request: Request) -> ASGIApp:
    """SGLang's /generate: one prompt answers with an object, a list (or n > 1) with a list of them."""
    gateway = gateway_of(request)
    body = await gateway.read(request, GenerateRequest)
    ready = gateway.ready_for(None)
    refuse_unsupported(body)
    prompts, is_batch = await _prompts(body, ready)
    sampling = _sampling(body, len(prompts))
    check_total(sum(params.n or 1 for params in sampling), ready.info)
    ids = _ids(body, len(prompts), request_id(request))
    answers = []
    for prompt, params, id in zip(prompts, sampling, ids, strict=True):
        plan = make_plan(
            _fields(params, body), [prompt], request_id=id, max_tokens=params.max_new_tokens,
            default_max_tokens=DEFAULT_MAX_NEW_TOKENS, codec=ready.codec, info=ready.info, grammar=of_sglang(params),
        )  # fmt: skip
        answers += gateway.answers(plan)
    report = _Report(answers, ids, is_batch)
    if body.stream:
        return event_stream(request, report.events())
    await until_disconnect(request.receive, report.run())
    return json_response(report.results())


class _Report:
    """Answers on their way, in SGLang's words. Its streams repeat the whole text so far in every event."""

    def __init__(self, answers: Sequence[Answer], ids: Sequence[str], is_batch: bool) -> None:
        self._answers = answers
        self._ids = ids
        self._began = time.monotonic()
        self._collected = [[Collected() for _ in answer.choices] for answer in answers]
        self._is_list = is_batch or len(answers[0].choices) > 1

    async def run(self) -> None:
        """Reads all answers to the end."""
        self._collected = await collect(self._answers)

    def results(self) -> Any:
        """What a request that does not stream gets."""
        made = [
            self._entry(index, choice)
            for index, answer in enumerate(self._answers)
            for choice in range(len(answer.choices))
        ]
        return made if self._is_list else made[0]

    async def events(self) -> AsyncGenerator[bytes]:
        """An event per delta; in a list each names its index."""
        async with contextlib.aclosing(numbered(self._answers)) as deltas:
            async for index, delta in deltas:
                self._collected[index][delta.choice].add(delta)
                entry = self._entry(index, delta.choice, running=delta.finish_reason is None)
                if self._is_list:
                    entry["index"] = index * len(self._answers[index].choices) + delta.choice
                yield b"data: " + msgspec.json.encode(entry) + b"\n\n"
        yield DONE

    def _entry(self, index: int, choice: int, *, running: bool = False) -> dict[str, Any]:
        answer, collected = self._answers[index], self._collected[index][choice]
        counts = answer.choices[choice]
        meta = {
            "id": self._ids[index],
            "finish_reason": None if running else _finish_reason(collected),
            "prompt_tokens": answer.prompt_len,
            "completion_tokens": counts.completion_tokens,
            "cached_tokens": counts.cached_tokens,
            "e2e_latency": time.monotonic() - self._began,
            **({} if running else spec_fields(counts.speculation)),
        }
        return {"text": collected.text, "output_ids": collected.tokens, "meta_info": meta}


def _finish_reason(collected: Collected) -> dict[str, Any]:
    if collected.finish_reason == "length":
        return {"type": "length", "length": len(collected.tokens)}
    return {"type": "stop", "matched": collected.matched}


def spec_fields(count: SpeculationCount) -> dict[str, Any]:
    """meta_info's account of speculation, with the older names beside the newer; empty when nothing was verified."""
    if not count.verify_steps:
        return {}
    accepted, drafted, histogram = count.accepted_tokens, count.draft_tokens, count.accepted_histogram
    return {
        "spec_accept_rate": accepted / max(drafted, 1),
        "spec_accept_length": count.accept_length,
        "spec_verify_ct": count.verify_steps,
        "spec_num_correct_drafts": accepted,
        "spec_num_proposed_drafts": drafted,
        "spec_correct_drafts_histogram": histogram,
        "spec_accepted_drafts": accepted,
        "spec_proposed_drafts": drafted,
        "spec_accept_token_num": accepted,
        "spec_draft_token_num": drafted,
        "spec_accept_histogram": histogram,
    }


# ---- Reading the request


async def _prompts(body: GenerateRequest, ready: Ready) -> tuple[list[Prompt], bool]:
    """The prompts as ids, and whether they came as a list."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidArgument("Give one of 'text' and 'input_ids'.", field="text", code="invalid_value")
    if body.input_ids is not None:
        prompts = as_prompts(body.input_ids, "input_ids")
        return await encode_prompts(prompts, "input_ids", ready.codec), not isinstance(body.input_ids[0], int)
    assert body.text is not None
    prompts = as_prompts(body.text, "text")
    return await encode_prompts(prompts, "text", ready.codec), not isinstance(body.text, str)


def _sampling(body: GenerateRequest, num_prompts: int) -> list[SglangSampling]:
    """Parameters per prompt: one set for all, or a set each."""
    given = body.sampling_params or SglangSampling()
    sets = given if isinstance(given, list) else [given] * num_prompts
    if len(sets) != num_prompts:
        raise _wrong_number("sampling_params")
    for params in sets:
        of_sglang(params)
    return sets


def _ids(body: GenerateRequest, num_prompts: int, fallback: str) -> list[str]:
    """SGLang's `rid`: the caller's names for its requests, or ours."""
    if body.rid is None:
        return [fallback if num_prompts == 1 else f"{fallback}-{index}" for index in range(num_prompts)]
    ids = [body.rid] if isinstance(body.rid, str) else body.rid
    if len(ids) != num_prompts:
        raise _wrong_number("rid")
    if any(len(id) > 256 for id in ids):
        raise InvalidArgument("A rid has at most 256 characters.", field="rid", code="string_above_max_length")
    return ids


def _wrong_number(field: str) -> InvalidArgument:
    return InvalidArgument(
        f"'{field}' must be one for all prompts, or one for each.", field=field, code="invalid_value"
    )


def _fields(params: SglangSampling, body: GenerateRequest) -> SamplingFields:
    """SGLang's names as ours."""
    given: dict[str, Any] = {}
    for name in SglangSampling.__struct_fields__:
        target = _RENAMED.get(name, name)
        if target is not None and name not in _GRAMMARS:
            given[target] = getattr(params, name)
    return SamplingFields(**given, speculative=body.speculative)


# ---- What is served


async def get_model_info(request: Request) -> ASGIApp:
    """SGLang's /get_model_info: `model_path` is the local folder that verify reads."""
    ready = gateway_of(request).ready()
    model = ready.info.model
    return json_response(
        {
            "model_path": model.model_path,
            "tokenizer_path": str(ready.tokenizer_path),
            "is_generation": True,
            "served_model_name": ready.model_name,
            "architectures": [model.architecture],
            "vocab_size": model.vocab_size,
            "context_length": ready.codec.context_length,
            "dtype": model.dtype,
            "quantization": model.quantization or None,
        }
    )


async def get_server_info(request: Request) -> ASGIApp:
    """SGLang's /get_server_info: the verify service's settings, and a state for each replica that serves."""
    gateway = gateway_of(request)
    ready = gateway.ready()
    infos = await gateway.replicas.ask_all() or [ready.info]
    return json_response(
        {
            **{name.replace("-", "_"): value for name, value in infos[0].arguments.items()},
            "model_path": ready.info.model.model_path,
            "served_model_name": ready.model_name,
            "version": outrider.__version__,
            "internal_states": [_internal_state(info) for info in infos],
        }
    )


def _internal_state(info: ServerInfo) -> dict[str, Any]:
    stats, state = info.speculation, info.state
    return {
        "avg_spec_accept_length": stats.committed_tokens / stats.verify_steps if stats.verify_steps else 0.0,
        "spec_verify_ct": stats.verify_steps,
        "spec_num_proposed_drafts": stats.draft_tokens,
        "spec_num_correct_drafts": stats.accepted_tokens,
        "last_gen_throughput": state.generation_tokens_per_s,
        "memory_usage": {"token_capacity": info.limits.max_total_tokens},
        "effective_max_running_requests_per_dp": info.limits.max_running_requests,
        "num_running_reqs": state.running_requests,
        "num_queue_reqs": state.queued_requests,
        "free_pages": state.free_pages,
        "total_pages": state.total_pages,
        "preemptions": state.preemptions,
        "boot_id": info.boot_id,
        "numerics_id": info.model.numerics_id,
        "drafters": [
            {
                "drafter_id": drafter.drafter_id,
                "algorithm": common_pb2.Algorithm.Name(drafter.algorithm).removeprefix("ALGORITHM_"),
                "draft_model": drafter.draft_model,
                "sessions": drafter.sessions,
                "proposals": dict(drafter.proposals),
            }
            for drafter in info.drafters
        ],
    }
