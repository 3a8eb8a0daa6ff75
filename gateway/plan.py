"""From a checked body to what is asked of verify: the rules that need the model, or several fields at once."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.error_values import no_such_token, shown
from gateway.field_names import Names
from gateway.prediction import Prediction
from gateway.sampling_defaults import SamplingDefaults, with_defaults
from gateway.schemas import (
    OpenAIFields,
    SamplingFields,
    SpeculativeOptions,
)
from gateway.served import Served
from gateway.text_stream import OutputRules
from gateway.tokenizer import TextCodec, too_long
from outrider.algorithms import WIRE_ALGORITHMS
from outrider.errors import InvalidArgument
from outrider.sampling import SamplingParams
from outrider.tree_limits import most_nodes
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import pack_ids

_SMALLEST_TOP_P = 1e-9  # OpenAI allows top_p 0: the likeliest token alone
_UINT64 = 2**64 - 1
_OURS = Names()


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as ids, and the name of the body field it came in."""

    ids: Sequence[int]
    field: str


@dataclass(frozen=True, slots=True)
class Report:
    """What is to be told of tokens beside their text. `top_logprobs` alternatives come with log-probabilities."""

    logprobs: bool = False
    prompt_logprobs: bool = False
    top_logprobs: int = 0
    pieces: bool = False  # each token apart, for whoever counts them
    markers: frozenset[str] = frozenset()  # control tokens that a parser of the text looks for


PLAIN = Report()


@dataclass(frozen=True, slots=True)
class Plan:
    """What one HTTP request asks: a call per prompt, and how their tokens become text."""

    calls: tuple[verify_pb2.GenerateRequest, ...]
    prompt_lens: tuple[int, ...]
    num_choices: int
    num_choices_field: str  # of the body
    rules: OutputRules
    empty: bool  # the tokens that verify makes are not wanted

    @property
    def apart(self) -> bool:
        """Whether choices end at different times by the gateway's doing, so that each needs a call of its own."""
        return bool(self.rules.stops)


def make_plan(
    fields: SamplingFields,
    prompts: Sequence[Prompt],
    *,
    request_id: str,
    max_tokens: int | None,
    codec: TextCodec,
    served: Served,
    defaults: SamplingDefaults,
    names: Names = _OURS,
    default_max_tokens: int | None = None,
    prediction: Sequence[int] | None = None,
    grammar: common_pb2.Grammar | None = None,
    report: Report = PLAIN,
) -> Plan:
    """Checks a request against the limits of what serves and writes its calls. InvalidArgument with `field` and `code`.

    `max_tokens` is what the caller said; the default gives way to min_tokens and the context, what a caller said does
    not. Of 0, which asks for nothing but the prompt, verify makes a token all the same. `names` are the caller's.
    `defaults` stand for what the fields leave out.
    """
    fields = with_defaults(fields, defaults)
    num_choices = _num_choices(fields, len(prompts), max_tokens, served, names)
    for prompt in prompts:
        _check_prompt(prompt, max_tokens, names.path("max_tokens"), codec.context_length, served.model.vocab_size)
    params = sampling_params(fields, max_tokens, served, names)
    sampling = params.to_proto()
    if grammar is not None:
        sampling.grammar.CopyFrom(grammar)
    predicted = None if prediction is None else prediction[: codec.context_length]
    calls = _calls(fields, prompts, sampling, predicted, report, request_id, num_choices)
    if max_tokens is None:  # verify is told all the same: an answer's end does not depend on whose context serves it
        most = codec.context_length if default_max_tokens is None else max(default_max_tokens, params.min_tokens)
        for call, prompt in zip(calls, prompts, strict=True):
            call.sampling.max_tokens = min(most, codec.context_length - len(prompt.ids))
    rules = _rules(fields, params, predicted, report, codec)
    prompt_lens = tuple(len(prompt.ids) for prompt in prompts)
    return Plan(calls, prompt_lens, num_choices, names.path("n"), rules, max_tokens == 0)


def _calls(
    fields: SamplingFields, prompts: Sequence[Prompt], sampling: common_pb2.SamplingParams,
    predicted: Sequence[int] | None, report: Report, request_id: str, num_choices: int,
) -> tuple[verify_pb2.GenerateRequest, ...]:  # fmt: skip
    """A call for each prompt, `sampling` in all of them, but for their seeds where the caller gave none."""
    options = fields.speculative or _NO_OPTIONS
    speculative = speculative_params(options)
    calls = tuple(
        verify_pb2.GenerateRequest(
            request_id=request_id if len(prompts) == 1 else f"{request_id}-{index}",
            prompt_tokens=pack_ids(prompt.ids),
            sampling=sampling,
            speculative=speculative,
            num_choices=num_choices,
            prediction_tokens=pack_ids(predicted or ()),
            priority=fields.priority or 0,
            cache_salt=fields.cache_salt or "",
            corpus_scope=fields.cache_salt or "",
            logprobs=report.logprobs,
            prompt_logprobs=report.prompt_logprobs,
            top_logprobs=report.top_logprobs if report.logprobs or report.prompt_logprobs else 0,
            include_trees=bool(options.include_trees),
        )
        for index, prompt in enumerate(prompts)
    )
    if fields.seed is None:  # texts that come of equal prompts are as many samples
        for call in calls[1:]:
            call.sampling.seed = _any_seed()
    return calls


def _rules(
    fields: SamplingFields, params: SamplingParams, predicted: Sequence[int] | None, report: Report, codec: TextCodec
) -> OutputRules:
    """How the tokens of every call become text."""
    return OutputRules(
        make_detokenizer=lambda: codec.detokenizer(
            skip_special=fields.skip_special_tokens is not False, keep=report.markers
        ),
        stops=stop_strings(fields),
        min_tokens=params.min_tokens,
        prediction=None if predicted is None else Prediction(predicted),
        pieces=report.logprobs or report.pieces or bool((fields.speculative or _NO_OPTIONS).include_origins),
    )


def _num_choices(fields: SamplingFields, num_prompts: int, max_tokens: int | None, served: Served, names: Names) -> int:
    """`n`, within what the server will run and hold for one request."""
    num_choices = fields.n or 1
    most = served.max_choices or 1
    if num_choices > most:
        raise _above_max(f"n is {num_choices}; this server gives at most {most} choices.", names.path("n"))
    check_total(num_prompts * num_choices, served, names.path("n"))
    held = served.max_total_tokens
    if num_choices > 1 and held and num_choices * (max_tokens or 0) > held:
        product = f"n times {names.word('max_tokens')}"
        raise _above_max(
            f"{product} is {num_choices * (max_tokens or 0)}; this server holds {held} tokens.", names.path("n")
        )
    return num_choices


def check_total(num_outputs: int, served: Served, field: str, code: str = "integer_above_max_value") -> None:
    """InvalidArgument when one HTTP request asks, by `field`, for more outputs than the server runs and queues."""
    most = max(served.max_outputs, 1)
    if num_outputs > most:
        raise _above_max(f"The request asks for {num_outputs} outputs; this server takes {most} at once.", field, code)


def _above_max(message: str, field: str, code: str = "integer_above_max_value") -> InvalidArgument:
    return InvalidArgument(message, field=field, code=code)


def sampling_params(fields: SamplingFields, max_tokens: int | None, served: Served, names: Names) -> SamplingParams:
    """The distribution and its end; a seed is drawn when none is given, so that any replica can go on."""
    if max_tokens is not None and (fields.min_tokens or 0) > max_tokens:
        raise InvalidArgument(
            f"{names.word('min_tokens')} is {fields.min_tokens}, above {names.word('max_tokens')}, {max_tokens}.",
            field=names.path("min_tokens"), code="invalid_value",
        )  # fmt: skip
    given: dict[str, Any] = {
        name: value
        for name in ("temperature", "min_p", "min_tokens", "ignore_eos", "presence_penalty", "frequency_penalty",
                     "repetition_penalty")
        if (value := getattr(fields, name)) is not None
    }  # fmt: skip
    try:
        params = SamplingParams(
            **given,
            top_k=max(fields.top_k or 0, 0),
            top_p=1.0 if fields.top_p is None else max(fields.top_p, _SMALLEST_TOP_P),
            seed=_any_seed() if fields.seed is None else fields.seed & _UINT64,
            max_tokens=None if max_tokens is None else max(max_tokens, 1),
            stop_token_ids=tuple(fields.stop_token_ids or ()),
            logit_bias=_logit_bias(fields.logit_bias or {}),
        )
        params.check_vocab(served.model.vocab_size)
    except InvalidArgument as error:
        error.field = names.path(error.field or "")
        raise
    return params


def _any_seed() -> int:
    return secrets.randbits(63)


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    """The bias by token id; the keys given are ids in decimal."""
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise InvalidArgument(
                f"The keys of logit_bias must be token ids; {shown(key)} is none.",
                field="logit_bias", code="invalid_value",
            )  # fmt: skip
    return {int(key): bias for key, bias in given.items()}


def stop_strings(fields: SamplingFields) -> tuple[str, ...]:
    """`stop`, which may be one string or several."""
    if fields.stop is None:
        return ()
    return (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)


def _check_prompt(
    prompt: Prompt, max_tokens: int | None, max_tokens_field: str, context_length: int, vocab_size: int
) -> None:
    if not prompt.ids:
        raise InvalidArgument("The prompt has no tokens.", field=prompt.field, code="invalid_value")
    if len(prompt.ids) + (max_tokens or 1) > context_length:
        fits_alone = len(prompt.ids) < context_length
        raise too_long(context_length, len(prompt.ids), max_tokens, max_tokens_field if fits_alone else prompt.field)
    if max(prompt.ids) >= vocab_size:
        raise no_such_token(max(prompt.ids), vocab_size, prompt.field)


_NO_OPTIONS = SpeculativeOptions()
_WIRE_OPTIONS = ("enabled", "num_steps", "num_draft_tokens", "accept_threshold_single", "accept_threshold_acc")


def speculative_params(options: SpeculativeOptions) -> common_pb2.SpeculativeParams:
    """What is asked of speculation, for the wire."""
    made = common_pb2.SpeculativeParams()
    for name in _WIRE_OPTIONS:
        if (value := getattr(options, name)) is not None:
            setattr(made, name, value)
    if (topk := _topk(options)) is not None:
        made.topk = topk
    if options.algorithm is not None:
        algorithm = WIRE_ALGORITHMS.get(options.algorithm.upper())
        if algorithm is None:
            raise InvalidArgument(
                f"Unknown algorithm {shown(options.algorithm)}; it must be one of {', '.join(WIRE_ALGORITHMS)}.",
                field="speculative.algorithm", code="invalid_value",
            )  # fmt: skip
        made.algorithm = algorithm
    _check_tree(options)
    return made


def _topk(options: SpeculativeOptions) -> int | None:
    """The setting `topk`, which has SGLang's name too."""
    if options.topk is not None and options.eagle_topk not in (None, options.topk):
        raise InvalidArgument(
            "topk and eagle_topk are one setting.", field="speculative.eagle_topk", code="invalid_value"
        )
    return options.topk or options.eagle_topk


def _check_tree(options: SpeculativeOptions) -> None:
    """InvalidArgument for more draft tokens than a tree of num_steps levels of topk branches has nodes to choose
    from."""
    topk = _topk(options)
    if options.num_steps is None or topk is None or options.num_draft_tokens is None:
        return
    most = most_nodes(options.num_steps, topk)
    if options.num_draft_tokens - 1 > most:
        raise InvalidArgument(
            f"num_draft_tokens is {options.num_draft_tokens}; num_steps and topk allow {most + 1}.",
            field="speculative.num_draft_tokens", code="integer_above_max_value",
        )  # fmt: skip


def check_stream_options(body: OpenAIFields) -> None:
    """InvalidArgument for options of a stream that is not asked for."""
    if body.stream_options is not None and not body.stream:
        raise InvalidArgument("stream_options needs stream.", field="stream_options", code="invalid_value")
