"""SGLang's /generate, as its clients and benchmarks read it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from itertools import accumulate
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from gateway.answer import numbered
from gateway.body import check_cost
from gateway.chunks import DONE
from gateway.completions import as_prompts, encode_prompts
from gateway.constraints import of_sglang, sglang_grammar_field
from gateway.exchange import event_stream, json_response, request_id
from gateway.field_names import Names
from gateway.native_output import Output, each_of, scores_of
from gateway.offload import offload
from gateway.plan import Prompt, check_total, make_plan
from gateway.schemas import GenerateRequest, SamplingFields, SglangSampling
from gateway.service import Ready, gateway_of
from gateway.unsupported import refuse_unsupported
from outrider.errors import InvalidArgument
from outrider.v1 import common_pb2
from outrider.wire import MAX_GRAMMAR_BYTES, MAX_NAME_CHARS

DEFAULT_MAX_NEW_TOKENS = 128
_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_THEIRS = {ours: theirs for theirs, ours in _RENAMED.items()}


async def generate(request: Request) -> ASGIApp:
    """SGLang's /generate: one prompt answers with an object, a list (or n > 1) with a list of them."""
    gateway = gateway_of(request)
    body = await gateway.read(request, GenerateRequest)
    ready = gateway.ready_for(None)
    refuse_unsupported(body)
    prompts, is_batch = await _prompts(body, ready)
    sampling = _sampling(body, len(prompts))
    names = _names(body, len(prompts))
    for params, called in zip(sampling, names, strict=True):
        refuse_unsupported(params, called)
    nums = [params.n or 1 for params in sampling]
    check_total(sum(nums), ready.served, names[nums.index(max(nums))].path("n"))
    ids = _ids(body, len(prompts), request_id(request))
    scores = scores_of(body, len(prompts))
    grammars = await _grammars(body, sampling, names)
    answers = []
    for prompt, params, id, wanted, called, grammar in zip(
        prompts, sampling, ids, scores, names, grammars, strict=True
    ):
        plan = make_plan(
            _fields(params, body), [prompt], request_id=id, max_tokens=_max_tokens(params, body, called),
            names=called, default_max_tokens=DEFAULT_MAX_NEW_TOKENS,
            codec=ready.codec, served=ready.served, defaults=ready.sampling, grammar=grammar, report=wanted.report,
        )  # fmt: skip
        answers += gateway.answers(
            plan, request, grammar_field=called.path(sglang_grammar_field(params)), prompt_field=prompt.field,
            top_logprobs_field="top_logprobs_num",
        )  # fmt: skip
    outputs = [
        Output(answer, id, wanted, ready.codec.piece, request.state.began, empty=params.max_new_tokens == 0)
        for answer, id, wanted, params in zip(answers, ids, scores, sampling, strict=True)
    ]
    run = _Run(outputs, is_batch)
    if body.stream:
        return event_stream(request, run.events())
    await run.collect()
    cost = sum(output.logprobs_cost for output in outputs)
    return await offload(cost, lambda: json_response(run.results()))


def _max_tokens(params: SglangSampling, body: GenerateRequest, names: Names) -> int | None:
    """SGLang's `max_new_tokens`: 0 asks for what is known of the prompt; the token that verify makes is dropped."""
    if params.max_new_tokens == 0 and body.stream:
        raise InvalidArgument(
            "max_new_tokens is 0; it must be at least 1 in a stream.",
            field=names.path("max_tokens"), code="integer_below_min_value",
        )  # fmt: skip
    return params.max_new_tokens


class _Run:
    """Answers on their way, in SGLang's words. Its streams repeat the whole text so far in every event."""

    def __init__(self, outputs: Sequence[Output], is_batch: bool) -> None:
        self._outputs = outputs
        self._answers = [output.answer for output in outputs]
        self._is_list = is_batch or len(outputs[0].choices) > 1
        self._firsts = [0, *accumulate(len(output.choices) for output in outputs)]  # each one's place in the list

    async def collect(self) -> None:
        """Reads all answers to the end."""
        async with contextlib.aclosing(numbered(self._answers)) as deltas:
            async for index, delta in deltas:
                self._outputs[index].choices[delta.choice].add(delta)

    def results(self) -> Any:
        """What a request that does not stream gets."""
        made = [output.entry(choice) for output in self._outputs for choice in range(len(output.choices))]
        return made if self._is_list else made[0]

    async def events(self) -> AsyncGenerator[bytes]:
        """An event per delta; in a list each names its index."""
        async with contextlib.aclosing(numbered(self._answers)) as deltas:
            async for index, delta in deltas:
                output = self._outputs[index]
                output.choices[delta.choice].add(delta)
                entry = output.entry(delta.choice, running=delta.finish_reason is None)
                if self._is_list:
                    entry["index"] = self._firsts[index] + delta.choice
                yield b"data: " + msgspec.json.encode(entry) + b"\n\n"
        yield DONE


# ---- Reading the request


async def _prompts(body: GenerateRequest, ready: Ready) -> tuple[list[Prompt], bool]:
    """The prompts as ids, and whether they came as a list."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidArgument("Give one of 'text' and 'input_ids'.", field="text", code="invalid_value")
    if body.input_ids is not None:
        prompts = as_prompts(body.input_ids, "input_ids")
        return await encode_prompts(prompts, "input_ids", ready), not isinstance(body.input_ids[0], int)
    assert body.text is not None
    prompts = as_prompts(body.text, "text")
    return await encode_prompts(prompts, "text", ready), not isinstance(body.text, str)


def _sampling(body: GenerateRequest, num_prompts: int) -> list[SglangSampling]:
    """Parameters per prompt: one set for all, or a set each."""
    return each_of(body.sampling_params, num_prompts, "sampling_params", SglangSampling())


async def _grammars(
    body: GenerateRequest, sampling: list[SglangSampling], names: list[Names]
) -> list[common_pb2.Grammar | None]:
    """The grammar of each prompt's parameters. All are read before an answer begins, since any may be refused."""
    num_sets = len(sampling) if isinstance(body.sampling_params, list) else 1
    sets = [*zip(sampling, names, strict=True)][:num_sets]
    schemas = [text for params, _ in sets if (text := params.json_schema) and len(text) <= MAX_GRAMMAR_BYTES]

    def read() -> list[common_pb2.Grammar | None]:
        check_cost("".join(schemas).encode(errors="replace"))
        return [of_sglang(params, called) for params, called in sets]

    return await offload(sum(map(len, schemas)), read) * (len(sampling) // num_sets)


def _names(body: GenerateRequest, num_prompts: int) -> list[Names]:
    """SGLang's names for the fields of each prompt's parameters."""
    if isinstance(body.sampling_params, list):
        return [Names(_THEIRS, f"sampling_params[{index}].") for index in range(num_prompts)]
    return [Names(_THEIRS, "sampling_params.")] * num_prompts


def _ids(body: GenerateRequest, num_prompts: int, fallback: str) -> list[str]:
    """SGLang's `rid`: the caller's names for its requests, or ours."""
    if body.rid is None:
        return [fallback if num_prompts == 1 else f"{fallback}-{index}" for index in range(num_prompts)]
    given = [body.rid] if isinstance(body.rid, str) else body.rid  # one is not for all: names tell them apart
    ids = each_of(given, num_prompts, "rid", fallback)
    if (longest := max(map(len, ids), default=0)) > MAX_NAME_CHARS:
        raise InvalidArgument(
            f"A rid has at most {MAX_NAME_CHARS} characters, not {longest}.",
            field="rid",
            code="string_above_max_length",
        )
    return ids


def _fields(params: SglangSampling, body: GenerateRequest) -> SamplingFields:
    """SGLang's parameters under our names."""
    ours = {_RENAMED.get(name, name): getattr(params, name) for name in SglangSampling.__struct_fields__}
    given: dict[str, Any] = {name: ours[name] for name in SamplingFields.__struct_fields__ if name in ours}
    return SamplingFields(**given, speculative=body.speculative, priority=body.priority, cache_salt=body.cache_salt)
