"""Bodies: read with a limit and a deadline, parsed as strict JSON, decoded into their type."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec
from starlette.requests import Request

from gateway.error_values import shown
from gateway.errors import HttpError, from_validation
from outrider.errors import InvalidArgument
from outrider.telemetry import get_logger

log = get_logger(__name__)

BodyT = TypeVar("BodyT", bound=msgspec.Struct)
_MAX_LOGGED_FIELDS = 256
_MAX_COST = 2**20  # values of a body, for which parsers keep the interpreter to themselves: some 50 ms
_CONTAINER_COST = 8  # an array or an object costs that many times what a number does
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # or one that never ends: linear in any case


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. 415 unless it is plain JSON in UTF-8, 413 as soon as it passes the limit, 408 when it dawdles."""
    for header in request.headers.getlist("content-type") or [""]:
        _check_content_type(header)
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise HttpError(415, "The body must not be compressed: this server knows no Content-Encoding.")
    declared = request.headers.get("content-length", "0")
    if int(declared) > max_bytes:  # the HTTP parser lets only digits through
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                chunks.append(chunk)
    except TimeoutError:
        message = f"The request body did not arrive within {timeout_s:g} s."
        raise HttpError(408, message) from None
    return b"".join(chunks)


def _check_content_type(header: str) -> None:
    kind, *parameters = [part.strip().lower() for part in header.split(";")]
    is_json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
    charsets = [value.strip('"') for key, _, value in (part.partition("=") for part in parameters) if key == "charset"]
    if not is_json or any(charset not in ("utf-8", "utf8") for charset in charsets):
        raise HttpError(415, "The Content-Type must be application/json in UTF-8.")


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(413, f"The request body is larger than {max_bytes} bytes.")


class BodyDecoder:
    """Decodes bodies and deals with what is not known in them: named once in the log, or refused when strict."""

    def __init__(self, *, strict_fields: bool, on_unknown: Callable[[], object] = lambda: None) -> None:
        self._strict = strict_fields
        self._on_unknown = on_unknown
        self._logged: set[str] = set()

    def decode(self, body: bytes, kind: type[BodyT]) -> BodyT:
        """`body` as `kind`; InvalidArgument with OpenAI's code and param, 413 for more values than are parsed."""
        check_cost(body)
        fields = _strict_object(body)
        try:
            decoded = msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as error:
            raise from_validation(error, fields, kind) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise _invalid_json() from None
        for name in _unknown_fields(fields, kind):
            self._unknown(name)
        return decoded

    def _unknown(self, name: str) -> None:
        name = name[:64].encode(errors="replace").decode()
        refusal = f"The body has an unknown field, {shown(name)}."
        self.leave_out(name, InvalidArgument(refusal, field=name, code="unknown_parameter"))

    def leave_out(self, name: str, refusal: InvalidArgument) -> None:
        """Counts what a body has and is not used, and logs `name` once; raises `refusal` when strict."""
        if self._strict:
            raise refusal
        self._on_unknown()
        if name not in self._logged and len(self._logged) < _MAX_LOGGED_FIELDS:
            self._logged.add(name)
            log.info("ignored an unknown field", field=name)


# Objects whose fields are looked at too; docs/errors.md and docs/http.md name them.
_OPTIONS = ("sampling_params", "speculative", "stream_options", "response_format", "structured_outputs")


def _unknown_fields(fields: dict[str, Any], kind: type[msgspec.Struct]) -> Iterator[str]:
    """Paths of the fields that `kind`, and the options in it, do not have."""
    yield from fields.keys() - set(kind.__struct_fields__)
    for name, known in _option_fields(kind):
        given = fields.get(name)
        for place, each in enumerate(given if isinstance(given, list) else [given]):
            if isinstance(each, dict):
                path = f"{name}[{place}]" if isinstance(given, list) else name
                yield from (f"{path}.{key}" for key in each.keys() - known)


@functools.cache
def _option_fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, frozenset[str]], ...]:
    """The options that `kind` has, each with its fields' names."""
    hints = get_type_hints(kind)
    return tuple((name, frozenset(_fields_of(hints[name]))) for name in _OPTIONS if name in hints)


def _fields_of(hint: Any) -> list[str]:
    """The names of the fields that the one struct in a type has."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return list(hint.__struct_fields__)
    return [name for part in get_args(hint) for name in _fields_of(part)]


def check_cost(body: bytes) -> None:
    """413 for too many values in the JSON of a body, or of schemas that came as texts.

    Where there may be so many, commas and brackets in strings are not counted.
    """
    if _cost(body, 0, len(body)) <= _MAX_COST:
        return
    cost = end = 0
    for number, string in enumerate(_STRING.finditer(body)):
        cost += _cost(body, end, string.start())
        end = string.end()
        if cost > _MAX_COST:
            break
        if number > 2 * cost + 2:  # no JSON: a comma or bracket stands before every other string
            return
    if cost + _cost(body, end, len(body)) > _MAX_COST:
        raise HttpError(
            413,
            f"The request has too many values; {_MAX_COST} are the most, and an array or object counts as "
            f"{1 + _CONTAINER_COST}.",
        )


def _cost(body: bytes, start: int, end: int) -> int:
    containers = body.count(b"[", start, end) + body.count(b"{", start, end)
    return body.count(b",", start, end) + _CONTAINER_COST * containers


def _strict_object(body: bytes) -> dict[str, Any]:
    """The body as a plain object: a parse for what msgspec lets pass, repeated keys, and for the names of fields."""
    try:
        value = strict_json(body.decode())
    except json.JSONDecodeError as error:
        raise _invalid_json(f": line {error.lineno}, column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise _invalid_json(f": byte {error.start + 1}") from None
    except (ValueError, RecursionError):
        raise _invalid_json() from None
    if not isinstance(value, dict):
        raise InvalidArgument("The body must be a JSON object.", code="invalid_json")
    return value


def strict_json(text: str) -> Any:
    """The value of a text. ValueError, or RecursionError, for what is no JSON, for NaN and for repeated keys."""
    return json.loads(text, object_pairs_hook=_no_repeats, parse_constant=_no_constant)


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("repeated key")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _invalid_json(where: str = "") -> InvalidArgument:
    return InvalidArgument(f"The body is not valid JSON in UTF-8 without repeated keys{where}.", code="invalid_json")
