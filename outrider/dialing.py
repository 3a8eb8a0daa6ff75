"""Channels to services as this process's flags want them: over TLS, with a token, made anew when certificates change.

Without either, a channel is a plain one and nothing stands between a call and gRPC.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from outrider import rpc
from outrider.args.links import DialingArgs, is_socket
from outrider.auth import Metadata, TokenFile, token_file
from outrider.errors import StartupError
from outrider.resolving import is_name
from outrider.telemetry import get_logger
from outrider.tls import Complaint, Stamp, TlsFiles, channel_credentials

log = get_logger(__name__)

_OLD_CHANNEL_S = 24 * 3600.0  # what calls may still take on a channel whose certificates are old
_RETRY_S = 1.0  # files that could not be used: the fault may have been another's, as where no descriptor was left

Dial = Callable[[str], grpc.aio.Channel]


class Dialer:
    """Makes channels. `tls` is not used on Unix sockets, which the file system guards.

    server_name: what certificates must name instead of the host that is dialled.
    """

    def __init__(
        self, *, tls: TlsFiles | None = None, tokens: TokenFile | None = None, server_name: str | None = None
    ) -> None:
        self._tls = tls
        self._tokens = tokens
        self._server_name = server_name
        if tls is not None:
            tls.read()  # at start, not at the first call

    def __call__(self, address: str) -> grpc.aio.Channel:
        """A channel to `host:port`, `unix:/path` or `unix-abstract:name`; it connects on first use."""
        tls = None if is_socket(address) else self._tls
        if tls is None and self._tokens is None:
            return rpc.create_channel(address)
        return DialledChannel(lambda: self._open(address, tls), tls, self._tokens)

    def _open(self, address: str, tls: TlsFiles | None) -> grpc.aio.Channel:
        if tls is None:
            return rpc.create_channel(address)
        return rpc.create_channel(address, credentials=channel_credentials(tls), server_name=self._server_name)


def dialer_of(
    args: DialingArgs, addresses: Sequence[str], token_path: str | None, token_flag: str = "--token-file"
) -> Dialer:
    """The dialer that the flags ask for, to verify services at these addresses. StartupError for unusable files."""
    tls, name = args.verify_tls, args.verify_ssl_server_name
    if tls is not None and name is None:
        name = common_name(addresses)
    return Dialer(tls=tls, tokens=token_file(token_path, token_flag), server_name=name)


def common_name(addresses: Sequence[str]) -> str | None:
    """The host name that certificates must have, where names are looked up before they are dialled.

    None where only IP addresses and sockets are given. StartupError where more than one host is.
    """
    tcp = [address for address in addresses if not (is_socket(address) or address.startswith("file:"))]
    hosts = sorted({address.rpartition(":")[0].strip("[]") for address in tcp})
    if not any(map(is_name, tcp)):
        return None
    if len(hosts) > 1:
        raise StartupError(
            f"--verify-address has several hosts ({', '.join(hosts)}): give the name that all their certificates have "
            "as --verify-ssl-server-name"
        )
    return hosts[0]


def terms_of(channel: grpc.aio.Channel) -> object:
    """What a call begun now would go by: the connection and the token. A long stream is of the terms it began with."""
    return (channel.current(), channel.metadata()) if isinstance(channel, DialledChannel) else None


class DialledChannel(grpc.aio.Channel):
    """A channel that adds the token to every call, and is made anew for the next call when certificates change.

    Calls under way stay on the channel that they began on.
    """

    def __init__(
        self, open_channel: Callable[[], grpc.aio.Channel], tls: TlsFiles | None, tokens: TokenFile | None
    ) -> None:
        self._open = open_channel
        self._tls = tls
        self._tokens = tokens
        self._stamp: Stamp | None = tls.stamp() if tls is not None else None  # of what the channel was made with
        self._tried: Stamp | None = None  # last, and next at `_retry_at` if that failed
        self._retry_at = 0.0
        self._complaint = Complaint()
        self._inner = open_channel()
        self._closing: set[asyncio.Task[None]] = set()

    def current(self) -> grpc.aio.Channel:
        """The channel for a call that begins now."""
        if self._tls is None:
            return self._inner
        try:
            stamp = self._tls.stamp()
            now = time.monotonic()
            if stamp != self._stamp and (stamp != self._tried or now >= self._retry_at):
                self._tried, self._retry_at = stamp, now + _RETRY_S
                old, self._inner = self._inner, self._open()
                self._stamp = stamp
                task = asyncio.get_running_loop().create_task(old.close(_OLD_CHANNEL_S))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
                log.info("certificates read again", path=self._tls.certfile or self._tls.ca_certs)
        except (OSError, StartupError) as error:
            self._complaint.say(error)
        return self._inner

    def metadata(self) -> Metadata:
        """What every call carries."""
        return self._tokens.metadata() if self._tokens is not None else ()

    async def __aenter__(self) -> DialledChannel:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Closes what is open."""
        await asyncio.sleep(0)  # what has not begun would not close what it is to close
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """The state of the channel for the next call."""
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Waits for another state of the channel for the next call."""
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Returns once it is connected."""
        await self.current().channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """A method, called with the token."""
        return _Method(self, "unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """A method, called with the token."""
        return _Method(self, "unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """A method, called with the token."""
        return _Method(self, "stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """A method, called with the token."""
        return _Method(self, "stream_stream", args, kwargs)


class _Method:
    """One method of a DialledChannel, bound to whichever channel is the current one."""

    def __init__(self, channel: DialledChannel, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._channel = channel
        self._kind, self._args, self._kwargs = kind, args, kwargs
        self._made_by: grpc.aio.Channel | None = None
        self._callable: Any = None

    def __call__(self, *args: Any, metadata: Any = None, **kwargs: Any) -> Any:
        current = self._channel.current()
        if current is not self._made_by:
            self._callable = getattr(current, self._kind)(*self._args, **self._kwargs)
            self._made_by = current
        return self._callable(*args, metadata=(*(metadata or ()), *self._channel.metadata()), **kwargs)
