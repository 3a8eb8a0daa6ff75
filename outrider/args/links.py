"""Flags of TLS and tokens, which every service takes: what it serves with, and what it dials verify services with."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass

from outrider.errors import StartupError
from outrider.flags import Args, arg, flag_named, is_text
from outrider.tls import TlsFiles, server_files

MAX_LABEL_CHARS = 63  # of a name in DNS
MAX_SOCKET_BYTES = 107  # of a Unix socket's path or name (unix(7))
_ALL_HOSTS = frozenset(("0.0.0.0", "[::]", ""))  # addresses of this machine, whichever
_READ_OTHERWISE = frozenset(",#?%")  # by gRPC, whose addresses are lists of URIs


@dataclass(frozen=True, kw_only=True)
class ServingArgs(Args):
    """How a service knows its callers, and they it."""

    ssl_certfile: str | None = arg(
        None, "security", "Certificate (PEM, with its chain) of what is served here; read again when it changes."
    )
    ssl_keyfile: str | None = arg(None, "security", "Its key.")
    ssl_ca_certs: str | None = arg(
        None, "security", "Authorities (PEM): callers must show a certificate of one of them (mutual TLS)."
    )
    token_file: str | None = arg(
        None, "security",
        "Tokens of services, one on a line, read again when it changes: gRPC callers must send one of them, and this "
        "service sends the first. Default: none.",
    )  # fmt: skip

    def check(self) -> None:
        """StartupError for flags that do not go together."""
        super().check()
        server_files(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)


@dataclass(frozen=True, kw_only=True)
class DialingArgs(Args):
    """TLS towards verify services."""

    verify_ssl_ca_certs: str | None = arg(
        None, "security", "Authorities (PEM) of verify services' certificates. Given, they are dialled over TLS."
    )
    verify_ssl_certfile: str | None = arg(
        None, "security", "Certificate (PEM) to show verify services; read again when it changes."
    )
    verify_ssl_keyfile: str | None = arg(None, "security", "Its key.")
    verify_ssl_server_name: str | None = arg(
        None, "security", "Name that verify services' certificates must have. Default: the host of --verify-address."
    )

    def check(self) -> None:
        """StartupError for flags that do not go together."""
        super().check()
        if (self.verify_ssl_certfile is None) != (self.verify_ssl_keyfile is None):
            raise StartupError("--verify-ssl-certfile and --verify-ssl-keyfile go together")
        for name in ("verify_ssl_certfile", "verify_ssl_server_name"):
            if getattr(self, name) is not None and self.verify_ssl_ca_certs is None:
                raise StartupError(f"{flag_named(name)} needs --verify-ssl-ca-certs")

    @property
    def verify_tls(self) -> TlsFiles | None:
        """The files to dial with; None: without TLS."""
        if self.verify_ssl_ca_certs is None:
            return None
        return TlsFiles(self.verify_ssl_certfile, self.verify_ssl_keyfile, self.verify_ssl_ca_certs, "--verify-ssl-")


def host_port(host: str, port: int | str) -> str:
    """An address as flags, URLs and logs have it: an IPv6 host stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_socket(address: str) -> bool:
    """Whether an address is a Unix socket, which goes without TLS."""
    return address.startswith(("unix:", "unix-abstract:"))


def socket_fault(path: str) -> str:
    """Why a Unix socket of this path or name cannot be bound or dialled by gRPC, in words; empty where it can."""
    if not is_text(path):
        return "gRPC takes no Unix socket whose path is not valid UTF-8"
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_BYTES:
        return f"a Unix socket's path has at most {MAX_SOCKET_BYTES} bytes, not {length}"
    if set(path) & _READ_OTHERWISE:
        return f"gRPC takes no Unix socket with one of {' '.join(sorted(_READ_OTHERWISE))} in its path"
    return ""


def check_address(flag: str, address: str, *, least_port: int = 1) -> None:
    """StartupError unless it is host:port, unix:/path or unix-abstract:name; an IPv6 host stands in brackets."""
    host, _, port = address.rpartition(":")
    is_host = host and (":" not in host or (host[0], host[-1]) == ("[", "]"))
    is_port = port.isascii() and port.isdigit() and len(port) < 6 and least_port <= int(port) < 65536
    if is_socket(address) and port:
        fault = socket_fault(address.partition(":")[2].removeprefix("//"))
        if fault:
            raise StartupError(f"{flag} is {address!r}; {fault}")
        return
    if not (is_host and is_port):
        raise StartupError(
            f"{flag} is {address!r}; it must be host:port (ports are {least_port} to 65535), unix:/path or "
            "unix-abstract:name"
        )
    lengths = [len(label) for label in host.removesuffix(".").split(".")]
    wrong = next((length for length in lengths if not 1 <= length <= MAX_LABEL_CHARS), None)
    if wrong is not None:
        raise StartupError(
            f"{flag} is {address!r}; between its dots a host's name has 1 to {MAX_LABEL_CHARS} characters, not {wrong}"
        )


def check_apart(addresses: dict[str, str | None]) -> None:
    """StartupError where two flags make one process, or parts of one server, listen at one place."""
    given = [(flag, address) for flag, address in addresses.items() if address is not None]
    for (flag, address), (other_flag, other) in itertools.combinations(given, 2):
        if _meet(address, other):
            raise StartupError(f"{flag} is {address}, and {other_flag} is {other}; one of them must be another")


def _meet(address: str, other: str) -> bool:
    """Whether who listens at one of them is in the way of the other; port 0 takes a free one."""
    if is_socket(address) or is_socket(other):
        return address == other
    (host, _, port), (other_host, _, other_port) = address.rpartition(":"), other.rpartition(":")
    return int(port) == int(other_port) != 0 and (host == other_host or bool(_ALL_HOSTS & {host, other_host}))


def check_tls_is_used(flag: str, given: str | None, addresses: tuple[str, ...]) -> None:
    """StartupError for TLS where only Unix sockets are listened on, or dialled."""
    if given is not None and addresses and all(is_socket(address) for address in addresses):
        raise StartupError(f"{flag} is for TCP; {', '.join(addresses)} goes without TLS, guarded by the file system")
