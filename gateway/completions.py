"""POST /v1/completions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request
from starlette.types import ASGIApp

from gateway.answer import Answer, collect, numbered
from gateway.exchange import event_stream, json_response, request_id, until_disconnect
from gateway.plan import Prompt, check_stream_options, make_plan, refuse_unsupported
from gateway.responses import DONE, Completion, CompletionChunks, TextChoice, Usage
from gateway.schemas import CompletionRequest
from gateway.service import Ready, gateway_of
from gateway.tokenizer import TextCodec
from outrider.errors import InvalidArgument

DEFAULT_MAX_TOKENS = 16


async def completions(request: Request) -> ASGIApp:
    """Checks, encodes, generates, answers; several prompts run at once."""
    gateway = gateway_of(request)
    body = await gateway.read(request, CompletionRequest)
    check_stream_options(body)
    ready = gateway.ready_for(body.model)
    refuse_unsupported(body)
    given = as_prompts(body.prompt, "prompt")
    prompts = await encode_prompts(given, "prompt", ready.codec)
    id = f"cmpl-{request_id(request)}"
    plan = make_plan(
        body, prompts, request_id=id, max_tokens=body.max_tokens, default_max_tokens=DEFAULT_MAX_TOKENS,
        codec=ready.codec, info=ready.info,
    )  # fmt: skip
    answers = gateway.answers(plan)
    echoes = [_echo(prompt, ready.codec) if body.echo else "" for prompt in given]
    if body.stream:
        return event_stream(request, _events(body, ready, answers, echoes, id))
    collected = await until_disconnect(request.receive, collect(answers))
    choices = [
        TextChoice(index * plan.num_choices + number, echoes[index] + choice.text, choice.finish_reason)
        for index, choices in enumerate(collected)
        for number, choice in enumerate(choices)
    ]
    return json_response(
        Completion(id, int(time.time()), ready.model_name, choices, Usage.of(answers), ready.fingerprint)
    )


async def _events(
    body: CompletionRequest, ready: Ready, answers: Sequence[Answer], echoes: Sequence[str], id: str
) -> AsyncGenerator[bytes]:
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    chunks = CompletionChunks(
        id=id, created=int(time.time()), model=ready.model_name, fingerprint=ready.fingerprint,
        include_usage=include_usage,
    )  # fmt: skip
    num_choices = len(answers[0].choices)
    begun: set[int] = set()
    async with contextlib.aclosing(numbered(answers)) as deltas:
        async for prompt, delta in deltas:
            index = prompt * num_choices + delta.choice
            if index not in begun:
                begun.add(index)
                if echoes[prompt]:
                    yield chunks.echo(index, echoes[prompt])
            yield chunks.events(index, delta)
    if include_usage:
        yield chunks.usage(Usage.of(answers))
    yield DONE


def as_prompts(given: str | Sequence[object], field: str) -> list[str | list[int]]:
    """One or several prompts, each text or ids; InvalidArgument for a mixture."""
    if isinstance(given, str):
        return [given]
    if all(isinstance(item, int) for item in given):
        return [list(given)]  # type: ignore[list-item]
    if any(isinstance(item, int) for item in given):
        raise InvalidArgument("A list of prompts must hold text or lists of ids.", field=field, code="invalid_type")
    return list(given)  # type: ignore[arg-type]


async def encode_prompts(prompts: Sequence[str | list[int]], field: str, codec: TextCodec) -> list[Prompt]:
    """Prompts as ids. A caller who writes the whole prompt may write control tokens in it."""
    made: list[Prompt] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            codec.check_length(prompt, field)
            made.append(Prompt(await codec.encode_prompt(prompt), field))
        else:
            made.append(Prompt(prompt, field))
    return made


def _echo(prompt: str | list[int], codec: TextCodec) -> str:
    """The prompt as text."""
    if isinstance(prompt, str):
        return prompt
    detokenizer = codec.detokenizer(skip_special=False)
    return "".join(map(detokenizer.push, prompt)) + detokenizer.finish()
