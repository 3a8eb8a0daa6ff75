"""A gRPC server as its flags want it: who may call, over which addresses, with which certificate."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc.aio

from outrider import rpc
from outrider.args.links import ServingArgs, is_socket
from outrider.auth import AuthInterceptor, TokenFile, token_file
from outrider.errors import StartupError
from outrider.grpc_thread import let_grpc_in_first
from outrider.strangers import Strangers
from outrider.telemetry import get_logger
from outrider.tls import server_credentials, server_files

log = get_logger(__name__)


def create_server(
    args: ServingArgs, apart: Sequence[tuple[str, TokenFile | None]] = (), strangers: Strangers | None = None
) -> grpc.aio.Server:
    """A server that asks for tokens if the flags say so. `apart`: as AuthInterceptor's. strangers: learns who calls."""
    tokens = token_file(args.token_file, "--token-file")
    is_open = tokens is None and all(own is None for _, own in apart)
    note = None if strangers is None else strangers.note
    server = rpc.create_server(auth=None if is_open else AuthInterceptor(tokens, apart, note), on_call=note)
    let_grpc_in_first()
    return server


def listen(server: grpc.aio.Server, args: ServingArgs, *addresses: str) -> list[str]:
    """Binds the addresses, over TLS where they are TCP's and there is a certificate; returns them as they are bound.

    Says a warning for one that other machines reach without TLS or without a token or client certificate: a private
    network may guard it, as in a composition of containers, and nothing here can tell.
    """
    files = server_files(args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs)
    credentials = server_credentials(files) if files is not None else None
    for address in addresses:
        if is_socket(address):
            _check_socket(address)  # once more: what listened a while ago loads a model now
    bound = [rpc.bind(server, address, credentials) for address in addresses]
    for address in bound:
        if is_loopback(address):
            continue
        missing = []
        if files is None:
            missing.append("TLS (--ssl-certfile, --ssl-keyfile)")
        if args.token_file is None and args.ssl_ca_certs is None:
            missing.append("a token (--token-file) or client certificates (--ssl-ca-certs)")
        if missing:
            log.warning(f"other machines can reach {address} without " + " and without ".join(missing))
    return bound


def check_free(*addresses: str) -> None:
    """StartupError for an address that cannot be listened on: asked before a model is loaded, and said in words."""
    for address in addresses:
        if is_socket(address):
            _check_socket(address)
            continue
        host, _, port = address.rpartition(":")
        try:
            tcp_listener(host.strip("[]"), int(port)).close()
        except OSError as error:  # taken, no host of ours, or no name that there can be
            raise StartupError(f"cannot listen on {address}: {getattr(error, 'strerror', None) or error}") from error


def tcp_listener(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """Listens where `resolved` says; on `::`, as gRPC does, for IPv4 too. OSError where it cannot."""
    family, where = resolved(host, port)
    both = where[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(where, family=family, backlog=backlog, dualstack_ipv6=both)


def resolved(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Where to listen: over IPv4 where the host has such an address, as localhost does, else over what it has.

    OSError where there is no such host.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:  # nothing between two dots, or more than DNS takes
        raise OSError(f"no host has such a name: {error}") from error
    family, *_, where = min(found, key=lambda one: one[0] != socket.AF_INET)
    return family, where


def _check_socket(address: str) -> None:
    """StartupError for a Unix socket that cannot be made, of which gRPC does not say why, or that somebody serves.

    gRPC would take the path of that one, and lose it when they end.
    """
    kind, _, name = address.partition(":")
    is_abstract, path = kind == "unix-abstract", Path(name.removeprefix("//"))
    fault = "another process serves there; give another address"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(f"\0{name}" if is_abstract else str(path))
        except OSError:  # there is none, or what is left of one
            fault = "" if is_abstract else _path_fault(path)
    if fault:
        raise StartupError(f"cannot listen on {address}: {fault}")


def _path_fault(path: Path) -> str:
    """Why there can be no Unix socket of ours at a path, in words; empty where there can be one."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}; make it, or give another path"
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return f"the folder {path.parent} cannot be written; give a path in another"
    if path.exists() and not path.is_socket():
        return "a file that is no socket is there; remove it, or give another path"
    return ""


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches a gRPC address."""
    if is_socket(address):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
