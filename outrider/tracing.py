"""OpenTelemetry traces of single requests across the gateway, verify and the drafters.

Off unless --otlp-traces-endpoint is given, and then for a share of the requests only. Context travels as W3C's
`traceparent`: in HTTP headers, in gRPC metadata, and for drafters in `Opened`. What a caller has decided is kept: a
request whose traceparent says so is traced or not, whatever the share. Spans are sent by a thread of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import outrider
from outrider.args.observing import ObservingArgs
from outrider.errors import StartupError
from outrider.wire import MAX_NAME_CHARS

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

TRACEPARENT = "traceparent"
REQUEST_ID = "x-request-id"
Attributes = Mapping[str, str | int | float | bool]
_CLOSE_S = 1.0  # for what is left: three parts in a row end within the margin that `outrider serve` gives them

# Of the HTTP request that the current task answers: what calls made for it send along.
_call_metadata: contextvars.ContextVar[tuple[tuple[str, str], ...]] = contextvars.ContextVar("metadata", default=())


def set_call_metadata(request_id: str, traceparent: str) -> None:
    """Calls that this task makes from here on carry the request's id and, where it is not empty, its trace."""
    trace = ((TRACEPARENT, traceparent),) if traceparent else ()
    _call_metadata.set(((REQUEST_ID, request_id), *trace))


def call_metadata() -> tuple[tuple[str, str], ...]:
    """The metadata that set_call_metadata set for this task; nothing elsewhere."""
    return _call_metadata.get()


def metadata_value(metadata: Sequence[tuple[str, str | bytes]] | None, key: str) -> str:
    """A text value of a call's metadata, empty where there is none; at most MAX_NAME_CHARS of it."""
    for name, value in metadata or ():
        if name == key and isinstance(value, str):
            return value[:MAX_NAME_CHARS]
    return ""


class Tracing:
    """Makes one process's spans."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("outrider", outrider.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def start(self, name: str, traceparent: str = "", *, server: bool = False) -> Span:
        """A span that begins now, below `traceparent`, or at the root of a trace where that is empty or malformed."""
        from opentelemetry.trace import SpanKind

        kind = SpanKind.SERVER if server else SpanKind.INTERNAL
        return self._tracer.start_span(name, self._context(traceparent), kind=kind)

    def record(self, name: str, traceparent: str, start_ns: int, end_ns: int, attributes: Attributes) -> None:
        """A span that is over. Times are of time.monotonic_ns or perf_counter_ns, which are one clock on Linux."""
        behind_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            name, self._context(traceparent), start_time=start_ns + behind_ns, attributes=dict(attributes)
        )
        span.end(end_ns + behind_ns)

    def traceparent(self, span: Span) -> str:
        """What names the span to other processes, whether or not it is sampled."""
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return carrier.get(TRACEPARENT, "")

    async def close(self, hurry: asyncio.Event | None = None) -> None:
        """Sends what is left; waits a short while at most, and not at all once `hurry` is set."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # nobody waited: the loop is closed
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=shut_down, name="closes tracing", daemon=True).start()
        waits = [asyncio.create_task(event.wait()) for event in (ended, hurry) if event is not None]
        await asyncio.wait(waits, timeout=_CLOSE_S, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _context(self, traceparent: str) -> Any:
        from opentelemetry.context import Context

        return self._propagator.extract({TRACEPARENT: traceparent}, Context())


def tracing_of(args: ObservingArgs, service: str) -> Tracing | None:
    """The tracing that the flags ask for; None: no traces. StartupError where OpenTelemetry is not installed."""
    if args.otlp_traces_endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ModuleNotFoundError as error:
        raise StartupError(
            f"--otlp-traces-endpoint needs the package {error.name!r}: in a checkout, pip install '.[tracing]'"
        ) from error
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(args.otlp_traces_sample_ratio)),
        resource=Resource.create({"service.name": f"outrider-{service}", "service.version": outrider.__version__}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=args.otlp_traces_endpoint)))
    return Tracing(provider)
