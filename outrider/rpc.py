"""gRPC plumbing that all services share: servers, channels, and errors becoming statuses in one place."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider import stopping
from outrider.args.links import is_socket
from outrider.errors import OutriderError, StartupError, Unavailable
from outrider.health_service import Health
from outrider.statuses import DETAILS_KEY, details_of, error_of, told_error
from outrider.telemetry import Throttle, get_logger
from outrider.wire import MAX_MESSAGE_BYTES

log = get_logger(__name__)

# Where a caller goes while its call ends, gRPC writes a traceback: nobody is at fault, and nothing is to be done.
logging.getLogger("grpc._cython.cygrpc").addFilter(lambda record: "ExecuteBatchError" not in str(record.msg))

_unread_lines = Throttle()

_KEEPALIVE_MS = 10_000
_KEEPALIVE_TIMEOUT_MS = 5_000
_LOST = "Internal error from Core"  # what grpc.aio says of a write that fails
_ENDED = "the call ended while it was written to; why, gRPC does not say"

_COMMON_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    # Keepalive's pings wait for their answers as long as all pings do: a minute, unless that is said too.
    ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),
    # Above the first limit gRPC refuses some, the more the nearer to the second, unless that is the same.
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
    # Who connects has so long for TLS and HTTP/2's first frames; a scanner holds a descriptor no longer.
    ("grpc.server_handshake_timeout_ms", 10_000),
)
# gRPC's own retries of a call that meets a server's end can go round for ever and take all memory (1.85).
NO_RETRIES = ("grpc.enable_retries", 0)
NO_PROXY = ("grpc.enable_http_proxy", 0)  # services reach one another as they are named, whatever http_proxy says
_CHANNEL_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # time for one attempt: TLS far away, a machine that is busy
    ("grpc.max_reconnect_backoff_ms", 2_000),
    NO_RETRIES,
    NO_PROXY,
    ("grpc.use_local_subchannel_pool", 1),
)


def create_channel(
    address: str,
    *,
    credentials: grpc.ChannelCredentials | None = None,
    server_name: str | None = None,
) -> grpc.aio.Channel:
    """A channel to `host:port`, `unix:/path` or `unix-abstract:name`; it connects on first use.

    It has a connection of its own. With credentials it speaks TLS, and the certificate must name `server_name`, or the
    host where that is None. outrider/dialing.py makes them from flags.
    """
    options: list[tuple[str, Any]] = [*_CHANNEL_OPTIONS]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    if server_name is not None:
        options.append(("grpc.ssl_target_name_override", server_name))
    return grpc.aio.secure_channel(address, credentials, options=options)


def create_server(
    *,
    auth: grpc.aio.ServerInterceptor | None = None,
    on_call: Callable[[str], None] | None = None,
) -> grpc.aio.Server:
    """A server whose handlers may raise OutriderError; anything else becomes INTERNAL without its text.

    auth: stands before everything else (outrider/auth.py). on_call: is told the peer of each call that is taken.
    """
    return grpc.aio.server(
        interceptors=[*([auth] if auth is not None else []), ErrorInterceptor(on_call)],
        options=list(_SERVER_OPTIONS),
    )


class _MethodsToo:
    """The pool of all descriptors. As reflection's protocol has it, a file is found by the name of a method too."""

    def __getattr__(self, name: str) -> Any:
        return getattr(descriptor_pool.Default(), name)

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:
        """The file of a message, field, service, method or the like. KeyError where there is none."""
        pool = descriptor_pool.Default()
        try:
            return pool.FindFileContainingSymbol(symbol)
        except KeyError:
            return pool.FindMethodByName(symbol).containing_service.file


def add_health_and_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> Health:
    """Serves grpc.health.v1 (all NOT_SERVING until set_serving) and reflection beside `service_names`."""
    servicer = Health()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    names = [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server, pool=cast(descriptor_pool.DescriptorPool, _MethodsToo()))
    set_serving(servicer, service_names, False)
    return servicer


def set_serving(servicer: Health, service_names: Sequence[str], serving: bool) -> None:
    """Sets the health of the server as a whole and of each named service."""
    status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    for name in ("", *service_names):
        servicer.set(name, status)


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> str:
    """Listens on `address` and returns it with the port that was chosen for port 0. StartupError if it is taken.

    credentials: those of TLS; Unix sockets, which the file system guards, go without.
    """
    if is_socket(address) and address.endswith(":"):
        raise StartupError(f"cannot listen on {address}: it must be unix:/path or unix-abstract:name")
    try:
        if credentials is None or is_socket(address):
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise StartupError(f"cannot listen on {address}: {str(error).partition(';')[0]}") from error
    if is_socket(address):
        return address
    if port == 0:
        raise StartupError(f"cannot listen on {address}")
    return f"{address.rpartition(':')[0]}:{port}"


def is_lost(error: grpc.aio.AioRpcError) -> bool:
    """Whether the status is grpc.aio's own, of a write that met the call's end: the peer's never comes to light."""
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == _LOST


def error_from_rpc(error: grpc.aio.AioRpcError) -> OutriderError:
    """Our error for a peer's status, with the field, code and retry delay that its details carry."""
    if is_lost(error):
        return Unavailable(_ENDED)
    trailing: Any = error.trailing_metadata() or ()
    details = next((value for key, value in trailing if key == DETAILS_KEY and isinstance(value, bytes)), b"")
    return error_of(error.code(), error.details() or error.code().name, details)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns exceptions of any kind of handler into statuses with google.rpc details."""

    def __init__(self, on_call: Callable[[str], None] | None) -> None:
        self._on_call = on_call

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Wraps the handler that the call details name."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        kind = kind_of(handler)
        behaviour = getattr(handler, kind)
        wrap = _wrap_stream if inspect.isasyncgenfunction(behaviour) else _wrap_unary
        if not (inspect.iscoroutinefunction(behaviour) or inspect.isasyncgenfunction(behaviour)):
            return handler  # a library's own synchronous handler
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        read = handler.request_deserializer
        return make(
            wrap(behaviour, handler_call_details.method, self._on_call),
            # Of a stream's messages, reading fails where the handler asks for the next.
            request_deserializer=read if read is None or handler.request_streaming else _readable(read),
            response_serializer=handler.response_serializer,
        )


def kind_of(handler: grpc.RpcMethodHandler) -> str:
    """Which of its four functions a handler has, by name: unary_unary, unary_stream, stream_unary, stream_stream."""
    shapes = {True: "stream", False: "unary"}
    return f"{shapes[handler.request_streaming]}_{shapes[handler.response_streaming]}"


def _readable(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Gives the error instead of a message that cannot be read, for the handler to raise: gRPC would log it."""

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return error

    return read


class _Unread:
    """Lives as long as one call's handler: says so when that goes without having been asked.

    gRPC refuses a request over the limits itself, before any handler hears of it; only here does a line tell of it.
    """

    def __init__(self, method: str) -> None:
        self._method = method
        self.read = False

    def __del__(self) -> None:
        if not self.read and _unread_lines.allows():
            # At an end in good order peers give calls up.
            tell = log.debug if stopping.has_begun() else log.warning
            tell("a call ended before its request was read: it was over a limit, or given up", method=self._method)


def _take(
    request: Any, context: grpc.aio.ServicerContext, unread: _Unread, on_call: Callable[[str], None] | None
) -> None:
    """A call has come as far as its handler. DecodeError where its request cannot be read."""
    unread.read = True
    if on_call is not None:
        on_call(context.peer())
    if isinstance(request, DecodeError):
        raise request


def _wrap_unary(
    behaviour: Callable[..., Awaitable[Any]], method: str, on_call: Callable[[str], None] | None
) -> Callable[..., Awaitable[Any]]:
    unread = _Unread(method)

    @functools.wraps(behaviour)
    async def handle(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            _take(request, context, unread, on_call)
            return await behaviour(request, context)
        except Exception as error:
            await _abort(context, error, method)

    return handle


def _wrap_stream(
    behaviour: Callable[..., Any], method: str, on_call: Callable[[str], None] | None
) -> Callable[..., Any]:
    unread = _Unread(method)

    @functools.wraps(behaviour)
    async def handle(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            _take(request, context, unread, on_call)
            async for response in behaviour(request, context):
                yield response
        except Exception as error:
            await _abort(context, error, method)

    return handle


async def _abort(context: grpc.aio.ServicerContext, error: Exception, method: str) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, grpc.aio.InternalError):  # a write that failed, as a rule since the caller is gone
        error = Unavailable(_ENDED)
    told = told_error(error, method)
    details = details_of(told)
    # What gRPC raises holds on to the error and to itself: what a broken stream held would wait for a collector.
    error.__traceback__ = None
    await context.abort(told.status, told.message, trailing_metadata=((DETAILS_KEY, details),) if details else ())
