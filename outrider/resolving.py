"""What addresses stand for at the moment: themselves, or all that a name in DNS has."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable

from outrider.args.links import host_port, is_socket
from outrider.telemetry import get_logger

log = get_logger(__name__)

LookUp = Callable[[str], Awaitable[list[str]]]


def is_name(address: str) -> bool:
    """Whether an address holds a host name, which may stand for something else tomorrow."""
    return not is_socket(address) and _ip(address) is None


async def endpoints_of(address: str) -> list[str]:
    """The endpoints that an address stands for: itself, or ip:port for each address of its name.

    OSError if none is known, UnicodeError for a name that DNS cannot be asked for.
    """
    if is_socket(address):
        return [address]
    host, _, port = address.rpartition(":")
    ip = _ip(address)
    if ip is not None:
        return [host_port(ip, port)]
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(host_port(str(info[4][0]), port) for info in infos))


def _ip(address: str) -> str | None:
    try:
        return str(ipaddress.ip_address(address.rpartition(":")[0].removeprefix("[").removesuffix("]")))
    except ValueError:
        return None


class Resolver:
    """Looks addresses up again and again; one that cannot be looked up stands for what it stood for last.

    complaint: what the log says of such a one, each reason once.
    """

    def __init__(self, look_up: LookUp, complaint: str = "cannot look up an address") -> None:
        self._look_up = look_up
        self._complaint = complaint
        self._last: dict[str, list[str]] = {}
        self._told: dict[str, str] = {}

    async def resolve(self, addresses: Iterable[str]) -> list[str]:
        """What they stand for now, each once, in order."""
        self._last = {address: await self._again(address) for address in addresses}
        return list(dict.fromkeys(endpoint for found in self._last.values() for endpoint in found))

    async def _again(self, address: str) -> list[str]:
        try:
            found = await self._look_up(address)
        except (OSError, UnicodeError) as error:
            if self._told.get(address) != str(error):
                self._told[address] = str(error)
                log.warning(self._complaint, address=address, error=str(error))
            return self._last.get(address, [])
        self._told.pop(address, None)
        return found
