"""TLS from files that may change while the process runs: certificates are renewed without a restart.

A server reads its files again at the next handshake after they changed, a client when it makes its next call. A file
that cannot be used leaves what was there before in place, with a line in the log.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import grpc

from outrider.errors import StartupError
from outrider.file_stamp import check_regular, file_stamp
from outrider.telemetry import Throttle, get_logger

log = get_logger(__name__)

ContextT = TypeVar("ContextT", bound=ssl.SSLContext)

Stamp = tuple[tuple[int, ...] | None, ...]


class Material(NamedTuple):
    """What the files hold, in PEM."""

    certificate: bytes | None
    key: bytes | None
    ca: bytes | None


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A certificate with its key, and whom to believe. `prefix` is that of the flags, for complaints."""

    certfile: str | None
    keyfile: str | None
    ca_certs: str | None
    prefix: str = "--ssl-"

    def stamp(self) -> Stamp:
        """Changes when a file does."""
        paths = self.certfile, self.keyfile, self.ca_certs
        return tuple(None if path is None else file_stamp(path) for path in paths)

    def read(self) -> Material:
        """The files' contents. StartupError when a file cannot be read, or certificate and key do not fit."""
        names = ("certfile", "keyfile", "ca-certs")
        paths = (self.certfile, self.keyfile, self.ca_certs)
        material = Material(*(_read(path, self.prefix + name) for name, path in zip(names, paths, strict=True)))
        self._check()
        return material

    def _check(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if self.certfile is not None:
            pair = f"{self.prefix}certfile {self.certfile} and {self.prefix}keyfile {self.keyfile}"
            try:
                context.load_cert_chain(self.certfile, self.keyfile)
            except (ssl.SSLError, OSError) as error:
                raise StartupError(f"{pair} are no certificate in PEM and its key: {error}") from error
        if self.ca_certs is not None:
            try:
                context.load_verify_locations(self.ca_certs)
            except (ssl.SSLError, OSError) as error:
                raise StartupError(
                    f"{self.prefix}ca-certs {self.ca_certs} has no certificate in PEM: {error}"
                ) from error


def server_files(certfile: str | None, keyfile: str | None, ca_certs: str | None) -> TlsFiles | None:
    """What a server shows, and the authorities whose clients it takes (None: any). None without a certificate."""
    if certfile is None and keyfile is None and ca_certs is None:
        return None
    if certfile is None or keyfile is None:
        raise StartupError("--ssl-certfile and --ssl-keyfile go together, and --ssl-ca-certs needs both")
    return TlsFiles(certfile, keyfile, ca_certs)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials for gRPC: with authorities given, clients must show a certificate of theirs. StartupError for
    unusable files."""
    stamp, complaint = files.stamp(), Complaint()
    first = _configuration(files.read())

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """Asked at every handshake. None: as before; gRPC frees what it replaces under the handshakes beside it."""
        nonlocal stamp
        try:
            if (now := files.stamp()) != stamp:
                material = _configuration(files.read())
                stamp = now
                log.info("certificates read again", path=files.certfile)
                return material
        except (OSError, StartupError) as error:
            complaint.say(error)
        return None

    return grpc.dynamic_ssl_server_credentials(
        first,
        changed,  # pyright: ignore[reportArgumentType]  # the stubs know no None
        require_client_authentication=files.ca_certs is not None,
    )


class Complaint:
    """Every handshake and call finds that the files cannot be used: a line a minute is enough."""

    def __init__(self) -> None:
        self._throttle = Throttle(lines_a_minute=1)

    def say(self, error: Exception) -> None:
        """Logs why, unless it was said just now."""
        if self._throttle.allows():
            left_out = self._throttle.suppressed
            log.warning("certificates cannot be read; those before stay", reason=str(error), lines_left_out=left_out)


def _configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    assert material.certificate is not None
    assert material.key is not None
    return grpc.ssl_server_certificate_configuration(
        [(material.key, material.certificate)], root_certificates=material.ca
    )


def http_context(files: TlsFiles) -> ssl.SSLContext:
    """The context of a server of Python's own. StartupError for unusable files."""
    stamp, current, complaint = files.stamp(), _context(files), Complaint()

    def choose(connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal stamp, current  # at every handshake, with a name or without
        try:
            if (now := files.stamp()) != stamp:
                stamp, current = now, _context(files)
                log.info("certificates read again", path=files.certfile)
        except (OSError, StartupError) as error:
            complaint.say(error)
        connection.context = current

    def outer(kind: type[ContextT]) -> ContextT:
        context = _bare(kind, files)
        context.sni_callback = choose
        return context

    if files.ca_certs is None:
        return outer(ssl.SSLContext)
    context = outer(_Unresumed)
    context.outer = partial(outer, ssl.SSLContext)
    return context


class _Unresumed(ssl.SSLContext):
    """A server's context for asyncio: every connection begins in one of its own, which knows no session of those before
    it.

    A client that resumes one shows no certificate, while its authority may be dropped, or its time over. To give no
    tickets is not enough: TLS 1.2 has a cache as well, which Python cannot turn off.
    """

    outer: Callable[[], ssl.SSLContext]

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """A connection, as SSLContext makes it, in a context of its own."""
        outer = self.outer()
        connection = outer.wrap_bio(*args, **kwargs)
        assert isinstance(connection, _Connection)
        connection.outer = outer
        return connection


class _Connection(ssl.SSLObject):
    """Holds the context that it began in: OpenSSL goes on to call back through it."""

    outer: ssl.SSLContext


def _bare(kind: type[ContextT], files: TlsFiles) -> ContextT:
    """A context without the files' contents."""
    context = kind(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if files.ca_certs is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        context.sslobject_class = _Connection
    return context


def _context(files: TlsFiles) -> ssl.SSLContext:
    files.read()
    assert files.certfile is not None
    context = _bare(ssl.SSLContext, files)
    context.load_cert_chain(files.certfile, files.keyfile)
    if files.ca_certs is not None:
        context.load_verify_locations(files.ca_certs)
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """The context of a client of Python's own: as `channel_credentials`. StartupError for unusable files."""
    files.read()
    context = ssl.create_default_context(cafile=files.ca_certs)
    if files.certfile is not None:
        context.load_cert_chain(files.certfile, files.keyfile)
    return context


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Credentials for gRPC: the server must show a certificate of one of the authorities. StartupError for unusable
    files."""
    material = files.read()
    return grpc.ssl_channel_credentials(material.ca, material.key, material.certificate)


def _read(path: str | None, flag: str) -> bytes | None:
    if path is None:
        return None
    try:
        check_regular(path)
        return Path(path).read_bytes()
    except OSError as error:
        raise StartupError(f"cannot read {flag}: {error}") from error
