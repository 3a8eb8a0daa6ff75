"""Every failure as OpenAI's error object and HTTP status, in one place. Messages name field, value and limit.

Verify's statuses arrive as OutriderError (outrider.errors has the table); what only HTTP knows is HttpError.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from gateway.error_values import found_at, missing, with_key, words_at
from outrider.errors import InvalidArgument, OutriderError, ResourceExhausted, Unimplemented

SHUTTING_DOWN = "The server is shutting down."

_TYPES = {429: "rate_limit_error", 500: "server_error", 502: "server_error", 503: "server_error", 504: "server_error"}
_CODES = {
    400: "invalid_value", 401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 408: "request_timeout",
    413: "request_too_large", 415: "unsupported_media_type", 429: "rate_limit_exceeded",
    431: "request_header_fields_too_large", 500: "internal_error", 503: "service_unavailable", 504: "timeout",
}  # fmt: skip
_RETRY_AFTER_S = {503: 1.0}
NOT_BEGUN = ("x-outrider-not-begun", "1")  # with a 503: nothing was generated, so that a balancer may try elsewhere


class HttpError(OutriderError):
    """A failure of the HTTP exchange itself, with the headers that go with its status."""

    def __init__(
        self,
        http_status: int,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message, field=field, code=code)
        self.http_status = http_status
        self.headers = headers


class ErrorBody(msgspec.Struct):
    """OpenAI's error: all four keys are always there."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct):
    """What a failed request gets as its body, and a failed stream as its last event."""

    error: ErrorBody


@dataclass(frozen=True, slots=True)
class Failure:
    """An error made ready to send."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...]


def failure(error: BaseException) -> Failure:
    """The status, headers and body for any exception; one that is not ours tells nothing but that it happened."""
    if not isinstance(error, OutriderError):
        error = OutriderError("The server failed on this request; its log says why.")
    status = error.http_status
    body = ErrorBody(
        message=error.message,
        type=_TYPES.get(status, "invalid_request_error"),
        param=error.field,
        code=error.code or ("unsupported_value" if isinstance(error, Unimplemented) else _CODES.get(status)),
    )
    headers = error.headers if isinstance(error, HttpError) else ()
    retry_after_s = error.retry_after_s if isinstance(error, ResourceExhausted) else _RETRY_AFTER_S.get(status)
    if retry_after_s is not None:
        headers = (*headers, ("retry-after", str(max(1, math.ceil(retry_after_s)))))
        headers = (*headers, ("retry-after-ms", str(math.ceil(retry_after_s * 1000))))
    if error.final and status >= HTTPStatus.INTERNAL_SERVER_ERROR:  # which OpenAI's clients try again
        headers = (*headers, ("x-should-retry", "false"))
    if status == HTTPStatus.UNAUTHORIZED:
        headers = (*headers, ("www-authenticate", "Bearer"))
    return Failure(status, msgspec.json.encode(ErrorEnvelope(body)), headers)


# msgspec's messages hold types, bounds and a path; `Invalid enum value 'x'` and its like may hold long input and are
# replaced.
_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?:\$|key in \$)\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>\w+)`$")
_BOUND = re.compile(r"^Expected `(?P<kind>\w+)`(?P<length> of length)? (?P<sign>[<>]=?) (?P<bound>[-+.e\d]+)$")
_WRONG_TYPE = re.compile(r"^Expected `[\w |]+`, got `(?P<got>\w+)`$")
_PATTERN = re.compile(r"^Expected `str` matching regex '(?P<pattern>.*)'$")
_NAMES = {"int": "integer", "float": "decimal", "str": "string"}


def from_validation(error: msgspec.ValidationError, body: object, kind: type) -> InvalidArgument:
    """OpenAI's code and `param` for a body that is no `kind`; `body` is what was read."""
    found = _PATH.match(str(error))
    what, path = (found["what"], found["path"] or None) if found else ("", None)
    if lacking := _MISSING.match(what):
        field = f"{path}.{lacking['name']}" if path else lacking["name"]
        return missing(field)
    wrong = _WRONG_TYPE.match(what)
    if wrong and path and path.endswith("[...]"):
        path = with_key(body, path, wrong["got"])
    where = f"'{path}'" if path else "the body"
    value = found_at(body, path) if path else ""
    if bound := _BOUND.match(what):
        told = f", not {value}" if value else ""
        return InvalidArgument(
            f"Invalid value for {where}: {_lower_first(what)}{told}.", field=path, code=_bound_code(bound)
        )
    if wrong:
        return InvalidArgument(f"Invalid type for {where}: {_lower_first(what)}.", field=path, code="invalid_type")
    allowed = words_at(kind, path) if path else ()
    told = f"; it must be one of {', '.join(allowed)}" if allowed else ""
    if pattern := _PATTERN.match(what):
        told = f"; it must match {pattern['pattern']}"
    return InvalidArgument(
        f"Invalid value for {where}{value and f': {value}'}{told}.", field=path, code="invalid_value"
    )


def _bound_code(bound: re.Match[str]) -> str:
    below = bound["sign"].startswith(">")
    if not bound["length"]:
        side = "below_min_value" if below else "above_max_value"
    elif below and bound["bound"] == "1":
        return f"empty_{_NAMES.get(bound['kind'], bound['kind'])}"
    else:
        side = "below_min_length" if below else "above_max_length"
    return f"{_NAMES.get(bound['kind'], bound['kind'])}_{side}"


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
