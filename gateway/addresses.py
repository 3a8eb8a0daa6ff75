"""Addresses of verify services as flags give them, and what they stand for at the moment.

An address may be a DNS name for several, or `file:PATH` of a file with one on each line.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from pathlib import Path

from outrider.args.links import host_port
from outrider.telemetry import get_logger

log = get_logger(__name__)

_FILE = "file:"
_told: dict[str, str] = {}  # what was said last of an address that stands for nothing: once is enough


def is_name(address: str) -> bool:
    """Whether an address is a file of addresses, or holds a host name that DNS may know."""
    if address.startswith(("unix:", "unix-abstract:")):
        return False
    try:
        ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return True
    return False


async def resolve(given: Iterable[str], before: Iterable[str]) -> set[str]:
    """Every concrete address now; where a name or file cannot be looked up, those of `before` stay."""
    found: set[str] = set()
    addresses: list[str] = []
    for address in given:
        try:
            addresses += _listed(address)
        except (OSError, UnicodeError) as error:
            _warn("cannot read verify addresses", address, error)
            found.update(before)
        else:
            _told.pop(address, None)
    for address in addresses:
        if not is_name(address):
            found.add(address)
            continue
        host, _, port = address.rpartition(":")
        try:
            entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            _warn("cannot look up a verify address", address, error)
            found.update(before)  # which of them were this one's, nobody knows
        else:
            _told.pop(address, None)
            found.update(host_port(str(entry[4][0]), port) for entry in entries)
    return found


def _listed(address: str) -> list[str]:
    """The address, or those in the file that it names, but for lines that begin with #.

    OSError where it has none: somebody is about to write them.
    """
    if not address.startswith(_FILE):
        return [address]
    path = address.removeprefix(_FILE)
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    listed = [line for line in map(str.strip, lines) if line and not line.startswith("#")]
    if not listed:
        raise OSError(f"{path} has no address")
    return listed


def _warn(event: str, address: str, error: Exception) -> None:
    if _told.get(address) != str(error):
        _told[address] = str(error)
        log.warning(event, address=address, error=str(error))
