"""Who connects to a gRPC port and makes no call: scans of ports, bytes of another protocol, certificates of strangers.

gRPC tells nothing of a connection before a call comes. Linux does: whoever asks is sent every TCP socket that ends,
with its addresses and the bytes that it received (sock_diag(7), its groups of destroyed sockets; no privilege is
needed, and one sees one's own network namespace alone). That costs one small message for each connection to our ports
that ends and one look into a dictionary for each call, and nothing for what goes over them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import ipaddress
import socket
import struct
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from outrider.args.links import is_socket
from outrider.metrics import Families, Family, Reading
from outrider.telemetry import Throttle, get_logger

log = get_logger(__name__)

FAMILIES = (
    Family(
        "outrider_connections_without_call_total", "counter", "gRPC connections over TCP that ended without a call."
    ),
)

_MOST_KNOWN = 65_536  # peers that made a call and whose end was not heard of
_READS_AT_ONCE = 64
_BUFFER_BYTES = 64 * 1024

_SOCK_DIAG = 4  # NETLINK_SOCK_DIAG
_DESTROYED = (1, 3)  # groups SKNLGRP_INET_TCP_DESTROY, SKNLGRP_INET6_TCP_DESTROY
_SOL_NETLINK, _ADD_MEMBERSHIP = 270, 1
_BY_FAMILY = 20  # SOCK_DIAG_BY_FAMILY
_DONE = 3  # NLMSG_DONE
_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_SO_ATTACH_FILTER = 26
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_PORTS = struct.Struct(">HH")  # inet_diag_msg: ours, theirs
_FAMILY_AT, _PORTS_AT, _PEER_AT, _ATTRIBUTES_AT = 16, 20, 40, 88
_ATTRIBUTE = struct.Struct("=HH")  # nlattr: length, type
_TCP_INFO = 2  # INET_DIAG_INFO
_RECEIVED_AT = 128  # tcp_info.tcpi_bytes_received


class Ended(NamedTuple):
    """A TCP connection that ended: our port, the peer as gRPC writes it, the bytes that came (a FIN counts as one)."""

    port: int
    peer: str
    received_bytes: int


class Strangers:
    """Tells in the log, and counts, who came and went without a call. `note` is given to the server (outrider/rpc.py).

    event: what the log says of them.
    """

    def __init__(self, event: str = "a connection ended without a call") -> None:
        self.num_ended = 0
        self._event = event
        self.families = Families(FAMILIES, self._read_metrics)
        self._known: dict[str, None] = {}
        self._watching = False
        self._throttle = Throttle()

    def note(self, peer: str) -> None:
        """Notes that this peer, as `tcp_peer` writes it, is no stranger: a call of its was taken."""
        if peer not in self._known:
            self._known[peer] = None
            if len(self._known) > _MOST_KNOWN:
                del self._known[next(iter(self._known))]

    def ended(self, connection: Ended) -> None:
        """Notes that a connection is no more."""
        if connection.peer in self._known:
            del self._known[connection.peer]
            return
        self.num_ended += 1
        if self._throttle.allows():
            log.info(
                self._event, peer=connection.peer, port=connection.port,
                received_bytes=connection.received_bytes, lines_left_out=self._throttle.suppressed,
            )  # fmt: skip

    @contextlib.asynccontextmanager
    async def watched(self, addresses: Sequence[str]) -> AsyncGenerator[None]:
        """Watches the TCP ports of these addresses; says in the log where the system does not tell what ends there."""
        ports = [int(address.rpartition(":")[2]) for address in addresses if not is_socket(address)]
        if not ports:
            yield
            return
        try:
            feed = open_feed(ports)
        except OSError as error:
            log.info("strangers are not told of: the system does not say who comes and goes", reason=str(error))
            yield
            return
        loop = asyncio.get_running_loop()
        self._watching = True
        with feed:
            loop.add_reader(feed.fileno(), self._read, feed)
            try:
                yield
            finally:
                loop.remove_reader(feed.fileno())

    def _read(self, feed: socket.socket) -> None:
        for _ in range(_READS_AT_ONCE):
            try:
                data = feed.recv(_BUFFER_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                continue  # a flood: some went by untold
            for connection in parse(data):
                self.ended(connection)

    def _read_metrics(self, reading: Reading) -> None:
        if self._watching:
            reading.add("outrider_connections_without_call_total", self.num_ended)


def open_feed(ports: Sequence[int]) -> socket.socket:
    """A socket that tells of every TCP connection to `ports` that ends. OSError where there is no such thing."""
    if not hasattr(socket, "AF_NETLINK"):
        raise OSError(errno.EAFNOSUPPORT, "it is not Linux")
    feed = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG)
    try:
        _ask_for_tcp(feed)
        _let_through(feed, ports)
        for group in _DESTROYED:
            feed.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, group)
        feed.setblocking(False)
    except OSError:
        feed.close()
        raise
    return feed


def _ask_for_tcp(feed: socket.socket) -> None:
    """OSError where the kernel cannot tell of TCP. It is asked for sockets in no state, and loads what that needs."""
    wanted = struct.pack("=BBBBI48x", socket.AF_INET, socket.IPPROTO_TCP, 0, 0, 0)
    feed.settimeout(1.0)
    feed.sendto(_HEADER.pack(_HEADER.size + len(wanted), _BY_FAMILY, _DUMP, 1, 0) + wanted, (0, 0))
    reply = feed.recv(_BUFFER_BYTES)
    kind = _HEADER.unpack_from(reply)[1]
    (code,) = struct.unpack_from("=i", reply, _HEADER.size)
    if kind != _DONE or code < 0:
        raise OSError(-code, "the kernel has no tcp_diag")


def _let_through(feed: socket.socket, ports: Sequence[int]) -> None:
    """Lets only what ends at these ports wake us: a kernel's filter (classic BPF) on the port in each message."""
    keep, drop, load_half, jump_equal = (0x06, 0, 0, 0xFFFFFFFF), (0x06, 0, 0, 0), 0x28, 0x15
    tests = [(jump_equal, len(ports) - index, 0, port) for index, port in enumerate(ports)]
    program = [(load_half, 0, 0, _PORTS_AT), *tests, drop, keep]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    feed.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(program), ctypes.addressof(code)))


def parse(data: bytes) -> list[Ended]:
    """The connections in what was read from a feed; the end of a listening socket is none."""
    found: list[Ended] = []
    while len(data) >= _ATTRIBUTES_AT:
        length, kind, *_ = _HEADER.unpack_from(data)
        message, data = data[:length], data[max(length + 3 & ~3, _HEADER.size) :]
        if kind != _BY_FAMILY or len(message) < _ATTRIBUTES_AT:
            continue
        ours, theirs = _PORTS.unpack_from(message, _PORTS_AT)
        if theirs:
            width = 4 if message[_FAMILY_AT] == socket.AF_INET else 16
            peer = tcp_peer(message[_PEER_AT : _PEER_AT + width], theirs)
            found.append(Ended(ours, peer, _received(message[_ATTRIBUTES_AT:])))
    return found


def tcp_peer(host: str | bytes, port: int) -> str:
    """An address as gRPC writes it, which IPv4 has one form in; host: as text, or its 4 or 16 bytes."""
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return f"ipv6:%5B{address}%5D:{port}"
        address = address.ipv4_mapped
    return f"ipv4:{address}:{port}"


def _received(attributes: bytes) -> int:
    while len(attributes) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(attributes)
        value = attributes[_ATTRIBUTE.size : length]
        if kind == _TCP_INFO and len(value) >= _RECEIVED_AT + 8:
            return struct.unpack_from("=Q", value, _RECEIVED_AT)[0]
        attributes = attributes[max(length + 3 & ~3, _ATTRIBUTE.size) :]
    return 0
