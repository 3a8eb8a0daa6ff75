"""Every failure that a caller may see, and the status each gets.

OutriderError
  InvalidArgument        the request is wrong                       INVALID_ARGUMENT     400
  Unauthenticated        no key, or a wrong one                     UNAUTHENTICATED      401
  NotFound               no such model, session, route              NOT_FOUND            404
  FailedPrecondition     both sides are right, but do not fit       FAILED_PRECONDITION  400
  ResourceExhausted      a limit is reached; try again later        RESOURCE_EXHAUSTED   429
  Unimplemented          known, and not offered here                UNIMPLEMENTED        400
  DeadlineExceeded       the caller's time is over                  DEADLINE_EXCEEDED    504
  Unavailable            not now: starting, draining, gone          UNAVAILABLE          503
  Internal               our fault                                  INTERNAL             500
  StartupError           the process cannot start; it exits with 2
    Unfinished           a tool cannot finish what it began; it exits with 1
"""

from __future__ import annotations

import grpc

# The code of Unavailable where a verify service's engine has failed: its sessions may have been the cause.
ENGINE_FAILED = "engine_failed"
_MAX_REASON_CHARS = 300  # libraries add advice, and pages of it


def reason_of(error: BaseException) -> str:
    """What a library's error says, in one line."""
    text = repr(error) if isinstance(error, KeyError) else str(error)
    words = " ".join(text.split())
    return (words if len(words) <= _MAX_REASON_CHARS else f"{words[:_MAX_REASON_CHARS]} ...") or type(error).__name__


class OutriderError(Exception):
    """A failure with a status. `field` names the request field at fault, `code` is OpenAI's error code."""

    status: grpc.StatusCode = grpc.StatusCode.INTERNAL
    http_status: int = 500
    final: bool = False  # whether the same request would fail again, and cost as much

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.code = code


class InvalidArgument(OutriderError):
    """The request breaks a rule; the message names the field, the value and the limit."""

    status = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400


class Unauthenticated(OutriderError):
    """No key, or a wrong one."""

    status = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401


class NotFound(OutriderError):
    """What the request names does not exist, or is not the caller's."""

    status = grpc.StatusCode.NOT_FOUND
    http_status = 404


class FailedPrecondition(OutriderError):
    """The two sides do not fit; the message gives both values."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 400


RETRY_SOON_S = 1.0  # of what others are about to make room for


class ResourceExhausted(OutriderError):
    """A limit is reached; the same request may succeed after `retry_after_s`. None: not for having waited."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429

    def __init__(
        self, message: str, *, field: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, field=field, code=code)
        self.retry_after_s = retry_after_s


class Unimplemented(OutriderError):
    """A known feature that this process does not offer."""

    status = grpc.StatusCode.UNIMPLEMENTED
    http_status = 400


class DeadlineExceeded(OutriderError):
    """The caller's deadline passed."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504
    final = True


class Unavailable(OutriderError):
    """Not now: the service starts, drains or is gone."""

    status = grpc.StatusCode.UNAVAILABLE
    http_status = 503


class Internal(OutriderError):
    """A fault of ours."""


class StartupError(OutriderError):
    """The process cannot start. The command prints the message and exits with `exit_code`."""

    exit_code = 2


class Unfinished(StartupError):
    """A tool cannot finish what it began."""

    exit_code = 1


BY_STATUS: dict[grpc.StatusCode, type[OutriderError]] = {
    kind.status: kind
    for kind in (
        InvalidArgument, Unauthenticated, NotFound, FailedPrecondition, ResourceExhausted, Unimplemented,
        DeadlineExceeded, Unavailable, Internal,
    )
}  # fmt: skip
