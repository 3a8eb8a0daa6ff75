"""Errors of ours as gRPC statuses with google.rpc details, and such statuses as errors again."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from typing import Any, NamedTuple

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from outrider.errors import (
    BY_STATUS,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    OutriderError,
    ResourceExhausted,
    Unavailable,
)
from outrider.telemetry import get_logger

log = get_logger(__name__)

DETAILS_KEY = "grpc-status-details-bin"  # of the trailing metadata that has google.rpc.Status
_ERROR_DOMAIN = "outrider"
_INTERNAL_CODE = "internal_error"  # tells our INTERNAL, whose message is meant for callers, from gRPC's and proxies'
# A message travels three times among headers, of which gRPC takes 8 KiB, and at up to three bytes for one.
_MAX_MESSAGE_BYTES = 1000
_SPENT = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))  # of this process or machine: another may serve
_MAX_RETRY_AFTER_S = 60.0  # of a peer's, which goes on to clients; none of ours tells more
_CODES = {code.value[0]: code for code in grpc.StatusCode}


def told_error(error: Exception, method: str) -> OutriderError:
    """What a caller of `method` is told of an error; one that is not ours goes to the log, and is INTERNAL.

    A message that is too long for a status is cut.
    """
    if isinstance(error, OutriderError):
        data = error.message.encode(errors="replace")
        if len(data) > _MAX_MESSAGE_BYTES:
            error.message = data[: _MAX_MESSAGE_BYTES - 4].decode(errors="ignore") + " ..."
        return error
    if isinstance(error, asyncio.TimeoutError):
        return DeadlineExceeded("the deadline passed")
    if isinstance(error, DecodeError):  # of what the caller sent: nothing else is decoded while a call is handled
        return InvalidArgument("the bytes sent are no message of this method, or hold a string that is not UTF-8")
    if isinstance(error, OSError) and error.errno in _SPENT:
        log.error("the system gives no more", method=method, reason=str(error))
        return Unavailable(f"this server can have no more files or memory now: {os.strerror(error.errno)}")
    log.error("unexpected error in handler", method=method, exc_info=error)
    return Internal("internal error; the server's log has it")


def details_of(error: OutriderError) -> bytes:
    """google.rpc.Status with the field, code and retry delay that the error has; empty where it has none."""
    details: list[any_pb2.Any] = []
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        details.append(_any(error_details_pb2.BadRequest(field_violations=[violation])))
    code = error.code or (_INTERNAL_CODE if error.status is grpc.StatusCode.INTERNAL else None)
    if code is not None:
        details.append(_any(error_details_pb2.ErrorInfo(reason=code, domain=_ERROR_DOMAIN)))
    if isinstance(error, ResourceExhausted) and error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        details.append(_any(error_details_pb2.RetryInfo(retry_delay=delay)))
    if not details:
        return b""
    code = code_pb2.Code.Value(error.status.name)
    return status_pb2.Status(code=code, message=error.message, details=details).SerializeToString()


def code_of(number: int) -> grpc.StatusCode:
    """gRPC's status by its number; UNKNOWN for one that there is not."""
    return _CODES.get(number, grpc.StatusCode.UNKNOWN)


def error_of(code: grpc.StatusCode, message: str, details: bytes = b"") -> OutriderError:
    """Our error for a peer's status, with the field, code and retry delay that its details carry."""
    kind = BY_STATUS.get(code, Internal)
    read = _read(details) if details else _Details()
    if kind is ResourceExhausted:
        return ResourceExhausted(message, field=read.field, code=read.code, retry_after_s=read.retry_after_s)
    return kind(message, field=read.field, code=read.code)


def _any(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


class _Details(NamedTuple):
    """What a status carries beside its message."""

    field: str | None = None
    code: str | None = None
    retry_after_s: float | None = None


def _read(details: bytes) -> _Details:
    """What can be read of them: a peer may send anything, and its status counts all the same."""
    found = _Details()
    with contextlib.suppress(DecodeError):
        for detail in status_pb2.Status.FromString(details).details:
            with contextlib.suppress(DecodeError):
                found = _with(found, detail)
    return found


def _with(found: _Details, detail: any_pb2.Any) -> _Details:
    bad_request, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    info = error_details_pb2.ErrorInfo()
    if detail.Unpack(bad_request) and bad_request.field_violations:
        return found._replace(field=bad_request.field_violations[0].field)
    if detail.Unpack(retry):
        told_s = retry.retry_delay.ToMilliseconds() / 1000
        return found._replace(retry_after_s=min(max(told_s, 0.0), _MAX_RETRY_AFTER_S))
    if detail.Unpack(info) and info.domain == _ERROR_DOMAIN:
        return found._replace(code=info.reason)
    return found
