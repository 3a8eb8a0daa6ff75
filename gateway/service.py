"""The gateway itself: what its routes share, and how it comes up.

It can answer once a verify service has told which model it serves and that model's tokenizer and template are loaded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from starlette.requests import Request

from gateway.account import Account
from gateway.answer import Answer
from gateway.backend import Backend
from gateway.body import BodyDecoder, BodyT, read_body
from gateway.error_values import no_such_model
from gateway.errors import SHUTTING_DOWN
from gateway.metrics import Metrics
from gateway.offload import offload
from gateway.plan import Plan
from gateway.probing import ProbeTimes
from gateway.reasoning import ReasoningFormat, reasoning_format
from gateway.replica import ServerInfo
from gateway.replicas import ReplicaSet
from gateway.route import Numerics, RetryPolicy
from gateway.sampling_defaults import OPENAI, SamplingDefaults, read_defaults
from gateway.served import Served, served_by
from gateway.template import ChatTemplate
from gateway.tokenizer import TextCodec, TokenizerFiles
from gateway.tool_parsers.formats import ToolFormat, tool_format
from gateway.totals import Totals
from outrider.args import GatewayArgs
from outrider.dialing import dialer_of
from outrider.errors import InvalidArgument, StartupError, Unavailable
from outrider.model_name import default_model_name
from outrider.stopping import cancelled
from outrider.telemetry import get_logger

log = get_logger(__name__)

# Fields that hold something else than a schema, and what.
_NO_SCHEMAS = {
    "regex": "regular expression", "ebnf": "grammar", "grammar": "grammar", "choice": "grammar of the choices",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ready:
    """What is known once a verify service has answered: text and name by the first that did, `served` as it is now."""

    served: Served
    model_path: str  # of the first
    codec: TextCodec
    template: ChatTemplate | None
    tools: ToolFormat
    reasoning: ReasoningFormat | None
    model_name: str
    tokenizer_path: Path
    sampling: SamplingDefaults
    created: int

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may call the model."""
        paths = (self.model_path, self.served.model.model_path)
        return (self.model_name, *paths, *(Path(path).name for path in paths), "default")


class Gateway:
    """One gateway process; `start` and `close` frame its life. It says when it is ready, or cannot come up."""

    def __init__(
        self, args: GatewayArgs, *, retry: RetryPolicy | None = None, probe: ProbeTimes | None = None,
        on_failure: Callable[[StartupError], None] | None = None, on_ready: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.args = args
        self.replicas = ReplicaSet(args.verify_address, probe, dialer_of(args, args.verify_address, args.token_file))
        patience = RetryPolicy(max_failures=args.max_failovers, patience_s=args.failover_patience_s)
        self.backend = Backend(self.replicas, retry or patience)
        self.metrics = Metrics(self.replicas)
        self.decoder = BodyDecoder(strict_fields=args.strict_fields, on_unknown=self.metrics.unknown_fields.inc)
        tool_format(args.tool_call_parser, None)  # a name that is not known ends the start
        self._reasoning = reasoning_format(args.reasoning_parser)
        self.leaving = False  # /health says so; requests are taken still
        self.draining = False
        self._on_failure = on_failure
        self._on_ready = on_ready
        self._ready: Ready | None = None
        self._preparation: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to look for verify services; requests get 503 until one is found."""
        await self.replicas.start()
        self._preparation = asyncio.create_task(self._prepare())

    async def close(self) -> None:
        """Ends everything that `start` began."""
        if self._preparation is not None:
            await cancelled(self._preparation)
        if self._ready is not None and self._ready.template is not None:
            await self._ready.template.close()
        await self.replicas.close()

    async def _prepare(self) -> None:
        while (info := self.replicas.info) is None:
            await self.replicas.wait_for_change(1.0)
        try:
            self._ready = await self._load(info)
        except StartupError as error:
            self.fail(error)
            return
        except Exception as error:
            log.error("unexpected error while loading the model's text files", exc_info=error)
            self.fail(StartupError("cannot load the model's text files; the log says why"))
            return
        if self._on_ready is not None:
            self._on_ready()
        log.info(
            "ready", model=self._ready.model_name, context_length=self._ready.codec.context_length,
            sampling=dict(self._ready.sampling),
        )  # fmt: skip

    def fail(self, error: StartupError) -> None:
        """Notes that the gateway cannot serve, because of `error`."""
        log.error("the gateway cannot serve", reason=error.message)
        if self._on_failure is not None:
            self._on_failure(error)

    async def _load(self, info: ServerInfo) -> Ready:
        args = self.args
        folder = Path(args.tokenizer_path or info.model.model_path)
        given = Path(args.chat_template) if args.chat_template else None
        model = info.model
        files = await asyncio.to_thread(TokenizerFiles.load, folder, given, model.vocab_size, model.vocab_fingerprint)
        of_model = args.sampling_defaults == "model"
        sampling = read_defaults(Path(info.model.model_path), folder) if of_model else OPENAI
        served = served_by([info])
        try:
            if files.template is not None:
                await files.template.start()
            codec = await asyncio.to_thread(
                TextCodec, files.tokenizer, context_length=served.context_length, template=files.template
            )
        except BaseException:
            if files.template is not None:
                await files.template.close()
            raise
        tools = tool_format(args.tool_call_parser, files.template.chosen(tools=True).source if files.template else None)
        name = args.served_model_name or default_model_name(info)
        return Ready(
            served, model.model_path, codec, files.template, tools, self._reasoning, name, folder, sampling,
            int(time.time()),
        )  # fmt: skip

    # ---- What routes ask

    def drain(self) -> None:
        """Takes no more requests."""
        self.draining = self.replicas.draining = True

    def ready(self) -> Ready:
        """What is known of the model; Unavailable until it is, and when no request can be served now."""
        if self.draining:
            raise Unavailable(SHUTTING_DOWN)
        served = self.replicas.served
        if served is None:
            raise Unavailable("No verify service is available.")
        if self._ready is None:
            raise Unavailable("The model's tokenizer is still being loaded.")
        if served.context_length:
            self._ready.codec.context_length = served.context_length
        return replace(self._ready, served=served)

    def ready_for(self, model: str | None) -> Ready:
        """What is known of the model, for a request that generates: as `named`; ResourceExhausted when all is full."""
        ready = self.named(model)
        self.backend.check_room()
        return ready

    def named(self, model: str | None) -> Ready:
        """What is known of the model, for a request that may name one: as `ready`; NotFound for another."""
        ready = self.ready()
        if model is not None and model not in ready.names:
            raise no_such_model(model, ready.model_name)
        return ready

    async def read(self, request: Request, kind: type[BodyT]) -> BodyT:
        """The request's body as `kind`, within the limits on bodies."""
        body = await read_body(request, max_bytes=self.args.max_body_bytes, timeout_s=self.args.receive_timeout_s)
        request.state.body_bytes = len(body)
        return await offload(len(body), self.decoder.decode, body, kind)

    def answers(
        self, plan: Plan, request: Request, *, grammar_field: str = "response_format", prompt_field: str = "messages",
        top_logprobs_field: str = "top_logprobs", probe: bool = False,
    ) -> list[Answer]:  # fmt: skip
        """An answer for each of the plan's prompts; the calls begin when its deltas are read.

        The fields are what verify's complaints about them are put down to. Of a `probe` nothing is counted.
        """
        self._check_sizes(plan, grammar_field, prompt_field)
        numerics = request.scope["state"].setdefault("numerics", Numerics())  # each of a batch comes here by itself
        account = Account(self.metrics, request.scope["state"], empty=plan.empty, probe=probe)
        fields = {
            "sampling.grammar": grammar_field, "prompt_tokens": prompt_field, "top_logprobs": top_logprobs_field,
            "num_choices": plan.num_choices_field,
        }  # fmt: skip
        prediction = plan.rules.prediction
        predicted = None if prediction is None else prediction.size * plan.num_choices * len(plan.calls)
        totals = Totals(sum(plan.prompt_lens), predicted)
        answers: list[Answer] = []
        for call, prompt_len in zip(plan.calls, plan.prompt_lens, strict=True):
            ended: set[int] = set()
            timeout_s = self.args.request_timeout_s
            responses = self.backend.generate(
                call, timeout_s=timeout_s, apart=plan.apart, ended=ended, numerics=numerics
            )
            answers.append(
                Answer(
                    responses, plan.rules, num_choices=plan.num_choices, prompt_len=prompt_len, totals=totals,
                    account=account, fields=fields, ended=ended,
                )
            )  # fmt: skip
        return answers

    def _check_sizes(self, plan: Plan, grammar_field: str, prompt_field: str) -> None:
        """InvalidArgument over the limits that the gateway itself sets on prompts and grammars."""
        most = self.args.max_prompt_tokens
        if most is not None and max(plan.prompt_lens) > most:
            raise InvalidArgument(
                f"The prompt has {max(plan.prompt_lens)} tokens; this server takes {most}.",
                field=prompt_field, code="context_length_exceeded",
            )  # fmt: skip
        grammar = plan.calls[0].sampling.grammar
        kind = grammar.WhichOneof("kind")
        size = 0 if kind in (None, "json_object") else len(getattr(grammar, kind).encode())
        if size > self.args.max_schema_bytes:
            what = _NO_SCHEMAS.get(grammar_field.rpartition(".")[2])
            raise InvalidArgument(
                f"The {what or 'schema'} has {size} bytes; this server takes {self.args.max_schema_bytes}.",
                field=grammar_field, code="invalid_grammar" if what else "invalid_json_schema",
            )  # fmt: skip


def gateway_of(request: Request) -> Gateway:
    """The gateway that a route belongs to."""
    return request.app.state.gateway
