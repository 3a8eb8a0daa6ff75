"""What is wrong with a request's head, and the bytes that tell so on a connection which is then closed."""

from __future__ import annotations

from collections.abc import Sequence

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway.errors import HttpError, failure

MAX_HEADER_BYTES = 32 * 1024  # of a request's headers, and again of its trailers


def fault_of_head(url: bytes, headers: Sequence[tuple[bytes, bytes]], version: str) -> HttpError | None:
    """Why a request is refused by its head, if it is. Names of headers are in small letters."""
    if sum(len(name) + len(value) + 4 for name, value in headers) + len(url) > MAX_HEADER_BYTES:
        return header_too_large()
    names = [name for name, _ in headers]
    lines = [value for name, value in headers if name == b"transfer-encoding"]
    if lines and b"content-length" in names:
        return HttpError(400, "A request has Content-Length or Transfer-Encoding, not both.")
    codings = b",".join(lines).lower().replace(b" ", b"").replace(b"\t", b"").split(b",")
    if lines and codings != [b"chunked"]:  # RFC 9112, 6.1 and 6.3
        message = "A body's only transfer coding is chunked."
        if codings[-1] != b"chunked":
            return HttpError(400, message)
        return HttpError(501, message, code="unsupported_value", headers=(("x-should-retry", "false"),))
    if names.count(b"host") != 1 and version == "1.1":
        return HttpError(400, "A request of HTTP/1.1 has one Host header.")  # RFC 9112, 3.2
    return None


def header_too_large() -> HttpError:
    """The refusal of headers, or of trailers, that are longer than MAX_HEADER_BYTES."""
    return HttpError(431, f"The request's headers are larger than {MAX_HEADER_BYTES} bytes.")


def refusal(error: HttpError, request_id: str) -> bytes:
    """A whole response, after which the connection is closed."""
    failed = failure(error)
    headers = [
        b"x-request-id: %b\r\n" % request_id.encode(), b"openai-processing-ms: 0\r\n",
        b"content-type: application/json\r\n", b"content-length: %d\r\n" % len(failed.body),
        b"connection: close\r\n", *(f"{name}: {value}\r\n".encode() for name, value in failed.headers), b"\r\n",
    ]  # fmt: skip
    return b"".join([STATUS_LINE[failed.status], *headers, failed.body])
