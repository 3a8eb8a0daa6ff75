"""Who may call: bearer tokens of services, compared in constant time, checked on every rpc before its request is read.

A token file holds one token a line, and is read again when it changes. The first is the one that this process sends;
any of them is accepted. So tokens rotate without a pause: add the new one below the old everywhere, then move it to the
top everywhere, then take the old one out. Health checks need no token.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from outrider.errors import StartupError
from outrider.telemetry import Throttle, get_logger

log = get_logger(__name__)

Metadata = tuple[tuple[str, str | bytes], ...]

_KEY = "authorization"
_SCHEME = "bearer"  # in any case, as RFC 9110 has it
_SHORTEST = 16
_OPEN = ("/grpc.health.v1.Health/",)


class TokenFile:
    """The tokens of one file, as it stands now.

    StartupError when it cannot be used at first; when it cannot later, the tokens before stay.
    """

    def __init__(self, path: str, flag: str) -> None:
        self._path = Path(path)
        self._flag = flag
        self._stamp: tuple[int, int] | None = None
        self._throttle = Throttle()
        self._tokens = self._read()

    def accepts(self, metadata: Sequence[tuple[str, str | bytes]] | None) -> bool:
        """Whether a call's metadata carries one of the tokens. Takes the same time for all that are wrong."""
        self._refresh()
        given = next((value for key, value in metadata or () if key == _KEY), "")
        text = given.decode(errors="replace") if isinstance(given, bytes) else given
        scheme, _, token = text.partition(" ")
        digest = _digest(token)
        matches = [hmac.compare_digest(digest, _digest(known)) for known in self._tokens]
        return scheme.lower() == _SCHEME and any(matches)

    def metadata(self) -> Metadata:
        """What a call sends along."""
        self._refresh()
        return ((_KEY, f"Bearer {self._tokens[0]}"),)

    def _refresh(self) -> None:
        try:
            if _stamp(self._path) != self._stamp:
                self._tokens = self._read()
                log.info("tokens read again", path=str(self._path), tokens=len(self._tokens))
        except (OSError, StartupError) as error:
            if self._throttle.allows():
                log.warning(
                    "a token file cannot be read; the tokens before stay", path=str(self._path), reason=str(error)
                )

    def _read(self) -> list[str]:
        try:
            stamp = _stamp(self._path)
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise StartupError(f"cannot read {self._flag}: {error}") from error
        self._stamp = stamp
        tokens = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not tokens:
            raise StartupError(f"{self._flag} {self._path} has no token")
        for number, token in enumerate(tokens, 1):
            if len(token) < _SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
                raise StartupError(
                    f"{self._flag} {self._path}: token {number} must have at least {_SHORTEST} printable ASCII "
                    "characters and no space"
                )
        return tokens


def token_file(path: str | None, flag: str) -> TokenFile | None:
    """The file's tokens, or None where there is no file."""
    return None if path is None else TokenFile(path, flag)


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid token as UNAUTHENTICATED. `apart`: services, by the beginning of their methods'
    paths, that have tokens of their own, or with None: are left to decide for themselves. on_call: is told the peer of
    each call that is refused: it has been heard of here."""

    def __init__(
        self, tokens: TokenFile | None, apart: Sequence[tuple[str, TokenFile | None]] = (),
        on_call: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self._tokens = tokens
        self._apart = apart
        self._on_call = on_call
        self._throttle = Throttle()
        self.refused = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """The method's handler, or one that refuses without reading anything."""
        method = handler_call_details.method
        tokens = next((own for prefix, own in self._apart if method.startswith(prefix)), self._tokens)
        metadata: Any = handler_call_details.invocation_metadata
        if tokens is None or method.startswith(_OPEN) or tokens.accepts(metadata):
            return await continuation(handler_call_details)
        return grpc.stream_stream_rpc_method_handler(self._refuse(method))

    def _refuse(self, method: str) -> Callable[..., AsyncIterator[bytes]]:
        async def refuse(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            self.refused += 1
            if self._on_call is not None:
                self._on_call(context.peer())
            if self._throttle.allows():
                log.warning(
                    "refused a call without a valid token", method=method, peer=context.peer(),
                    lines_left_out=self._throttle.suppressed,
                )  # fmt: skip
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a valid token is needed: authorization: Bearer TOKEN")
            yield b""

        return refuse


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_ino


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()
