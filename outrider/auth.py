"""Who may call: bearer tokens of services, compared in constant time, checked on every rpc before its request is read.

A token file holds one token a line, and is read again when it changes. The first is the one that this process sends;
any of them is accepted. So tokens rotate without a pause: add the new one below the old everywhere, then move it to the
top everywhere, then take the old one out. Health checks need no token.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from outrider.errors import StartupError
from outrider.listed_lines import WatchedFile
from outrider.telemetry import Throttle, get_logger

log = get_logger(__name__)

Metadata = tuple[tuple[str, str | bytes], ...]

_KEY = "authorization"
_SCHEME = "bearer"  # in any case, as RFC 9110 has it
_SHORTEST = 16
_OPEN = ("/grpc.health.v1.Health/",)


class TokenFile(WatchedFile[str]):
    """The tokens of one file, as it stands now."""

    listed = "tokens"

    def accepts(self, metadata: Sequence[tuple[str, str | bytes]] | None) -> bool:
        """Whether a call's metadata carries one of the tokens. Takes the same time for all that are wrong."""
        self.refresh()
        given = next((value for key, value in metadata or () if key == _KEY), "")
        text = given.decode(errors="replace") if isinstance(given, bytes) else given
        scheme, _, token = text.partition(" ")
        digest = _digest(token)
        matches = [hmac.compare_digest(digest, _digest(known)) for known in self.entries]
        return scheme.lower() == _SCHEME and any(matches)

    def metadata(self) -> Metadata:
        """What a call sends along."""
        self.refresh()
        return ((_KEY, f"Bearer {self.entries[0]}"),)

    def _parsed(self, lines: list[tuple[int, str]]) -> list[str]:
        tokens = [line for _, line in lines]
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


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()
