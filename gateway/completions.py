"""POST /v1/completions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import ASGIApp

from gateway.answer import Answer, Collected, collect, numbered
from gateway.chunks import DONE, CompletionChunks, extension_of
from gateway.constraints import grammar_field, of_openai
from gateway.detokenizer import Detokenizer
from gateway.exchange import event_stream, json_response, request_id
from gateway.logprobs import TextLogprobs, TextScores, logprobs_cost
from gateway.offload import ID_COST, breathe, offload
from gateway.plan import Prompt, Report, check_stream_options, check_total, make_plan
from gateway.responses import Completion, TextChoice, Usage
from gateway.schemas import CompletionRequest
from gateway.service import Ready, gateway_of
from gateway.tokenizer import TextCodec
from gateway.unsupported import refuse_unsupported
from outrider.errors import InvalidArgument
from outrider.v1 import verify_pb2

DEFAULT_MAX_TOKENS = 16


async def completions(request: Request) -> ASGIApp:
    """Answers POST /v1/completions: checks, encodes, generates; several prompts run at once."""
    gateway = gateway_of(request)
    body = await gateway.read(request, CompletionRequest)
    check_stream_options(body)
    ready = gateway.ready_for(body.model)
    refuse_unsupported(body)
    given = as_prompts(body.prompt, "prompt")
    prompts = await encode_prompts(given, "prompt", ready)
    id = f"cmpl-{request_id(request)}"
    wanted = body.logprobs is not None
    report = Report(logprobs=wanted, prompt_logprobs=wanted and bool(body.echo), top_logprobs=body.logprobs or 0)
    plan = make_plan(
        body, prompts, request_id=id, max_tokens=_max_tokens(body), default_max_tokens=DEFAULT_MAX_TOKENS,
        codec=ready.codec, served=ready.served, defaults=ready.sampling, grammar=of_openai(body), report=report,
    )  # fmt: skip
    echoes = await _echoes(given, ready.codec) if body.echo else [""] * len(given)
    answers = gateway.answers(
        plan, request, grammar_field=grammar_field(body), prompt_field="prompt", top_logprobs_field="logprobs"
    )
    run = _Run(body, ready, answers, echoes, id)
    if body.stream:
        return event_stream(request, run.events())
    collected = await collect(answers)
    cost = sum(logprobs_cost(answer, body.logprobs or 0) for answer in answers) if wanted else 0
    return await offload(cost, lambda: json_response(run.completion(collected)))


def _max_tokens(body: CompletionRequest) -> int | None:
    """The `max_tokens` of a body: 0 asks for the echoed prompt alone; the token that verify makes is dropped."""
    if body.max_tokens == 0 and not (body.echo and not body.stream):
        raise InvalidArgument(
            "max_tokens is 0; it must be at least 1, but with echo and without stream.",
            field="max_tokens", code="integer_below_min_value",
        )  # fmt: skip
    return body.max_tokens


@dataclass(slots=True)
class _Run:
    """The answers of one request on their way."""

    body: CompletionRequest
    ready: Ready
    answers: Sequence[Answer]
    echoes: Sequence[str]
    id: str
    echoed: dict[int, TextScores] = field(default_factory=dict)  # by prompt: the part that its choices share

    @property
    def _num_choices(self) -> int:
        return len(self.answers[0].choices)

    def _scores(self, prompt: int) -> TextScores:
        """Collects the log-probabilities of a choice: of the prompt first, where it is echoed."""
        if prompt not in self.echoed:
            scores = TextScores(self.ready.codec.piece, self.body.logprobs or 0)
            logprobs = self._prompt_logprobs(prompt)
            detokenizer = self.ready.codec.detokenizer(skip_special=False)
            lengths = lengths_in(self.echoes[prompt], [logprob.token for logprob in logprobs], detokenizer)
            scores.add_prompt(logprobs, lengths)
            self.echoed[prompt] = scores
        return self.echoed[prompt].copy()

    def _prompt_logprobs(self, prompt: int) -> list[verify_pb2.TokenLogprob]:
        """A prompt's own, of the first of its choices that has begun."""
        if not self.body.echo:
            return []
        return next((choice.prompt_logprobs for choice in self.answers[prompt].choices if choice.prompt_logprobs), [])

    def completion(self, collected: list[list[Collected]]) -> Completion:
        """The answer to a request that does not stream."""
        choices = [
            self._choice(prompt, number, choice)
            for prompt, choices in enumerate(collected)
            for number, choice in enumerate(choices)
        ]
        usage = self._usage()
        if self.body.max_tokens == 0:
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        ready = self.ready
        return Completion(self.id, int(time.time()), ready.model_name, choices, usage, self.answers[0].fingerprint)

    def _choice(self, prompt: int, number: int, choice: Collected) -> TextChoice:
        index = prompt * self._num_choices + number
        logprobs: TextLogprobs | None = None
        if self.body.logprobs is not None:
            scores = self._scores(prompt)
            scores.add(choice.pieces if self.body.max_tokens != 0 else ())
            logprobs = scores.take()
        text = self.echoes[prompt] + (choice.text if self.body.max_tokens != 0 else "")
        return TextChoice(index, text, choice.finish_reason if self.body.max_tokens != 0 else "length", logprobs)

    async def events(self) -> AsyncGenerator[bytes]:
        """The events of the stream."""
        created, chunks = int(time.time()), None
        scores: dict[int, TextScores] = {}
        async with contextlib.aclosing(numbered(self.answers)) as deltas:
            async for prompt, delta in deltas:
                chunks = chunks or self._chunks(self.answers[prompt], created)
                index = prompt * self._num_choices + delta.choice
                if index not in scores:
                    scores[index] = await offload(self._cost(prompt), self._scores, prompt)
                    if self.echoes[prompt]:
                        yield chunks.echo(index, self.echoes[prompt], self._take(scores[index]))
                if self.body.logprobs is not None:
                    scores[index].add(delta.pieces or ())
                yield chunks.events(index, delta, self._take(scores[index]))
        options = self.body.stream_options
        if chunks is not None and options and options.include_usage:
            yield chunks.usage(self._usage())
        yield DONE

    def _cost(self, prompt: int) -> int:
        """Bytes that an echoed prompt's log-probabilities are worth, as `offload` reckons."""
        return ID_COST * len(self._prompt_logprobs(prompt)) * (1 + (self.body.logprobs or 0))

    def _chunks(self, begun: Answer, created: int) -> CompletionChunks:
        """The writer of the stream, with the fingerprint of the answer that has begun first."""
        options, ready = self.body.stream_options, self.ready
        return CompletionChunks(
            id=self.id, created=created, model=ready.model_name, fingerprint=begun.fingerprint,
            include_usage=bool(options and options.include_usage),
            extension=extension_of(self.body.speculative, ready.codec.piece),
            current_usage=self._usage if options and options.continuous_usage_stats else None,
        )  # fmt: skip

    def _usage(self) -> Usage:
        return Usage.of(self.answers[0].totals)

    def _take(self, scores: TextScores) -> TextLogprobs | None:
        return scores.take() if self.body.logprobs is not None else None


def as_prompts(given: str | Sequence[str | int | list[int]], field: str) -> list[str | list[int]]:
    """One or several prompts, each text or ids; InvalidArgument for a mixture."""
    if isinstance(given, str):
        return [given]
    ids = [item for item in given if isinstance(item, int)]
    prompts = [item for item in given if not isinstance(item, int)]
    if ids and prompts:
        raise InvalidArgument("A list of prompts must hold text or lists of ids.", field=field, code="invalid_type")
    return prompts or [ids]


async def encode_prompts(prompts: Sequence[str | list[int]], field: str, ready: Ready) -> list[Prompt]:
    """Prompts as ids. A caller who writes the whole prompt may write control tokens in it."""
    check_total(len(prompts), ready.served, field, code="array_above_max_length")
    codec = ready.codec
    made: list[Prompt] = []
    for place, prompt in enumerate(prompts):
        await breathe(place)
        own = field if len(prompts) == 1 else f"{field}[{place}]"
        if isinstance(prompt, str):
            codec.check_length(prompt, own)
            made.append(Prompt(await codec.encode_prompt(prompt), own))
        else:
            made.append(Prompt(prompt, own))
    return made


def lengths_in(text: str, tokens: Sequence[int], detokenizer: Detokenizer) -> list[int]:
    """The characters that each of the tokens of an echoed prompt has of its text.

    Tokens that the tokenizer put in front of the caller's text have none.
    """
    lengths = [len(detokenizer.push(token)) for token in tokens]
    if lengths:
        lengths[-1] += len(detokenizer.finish())
    added = sum(lengths) - len(text)
    for place, length in enumerate(lengths):
        if added <= 0:
            break
        lengths[place] -= min(length, added)
        added -= length
    return lengths


async def _echoes(prompts: Sequence[str | list[int]], codec: TextCodec) -> list[str]:
    num_ids = sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))
    return await offload(ID_COST * num_ids, lambda: [_echo(prompt, codec) for prompt in prompts])


def _echo(prompt: str | list[int], codec: TextCodec) -> str:
    """The prompt as text."""
    if isinstance(prompt, str):
        return prompt
    detokenizer = codec.detokenizer(skip_special=False)
    return "".join(map(detokenizer.push, prompt)) + detokenizer.finish()
