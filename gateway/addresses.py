"""Addresses of verify services as flags give them, and what they stand for at the moment.

An address may be a DNS name for several, or `file:PATH` of a file with one on each line.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from pathlib import Path

from outrider.telemetry import get_logger

log = get_logger(__name__)

_FILE = "file:"


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
    try:
        addresses = [listed for address in given for listed in _listed(address)]
    except (OSError, UnicodeError) as error:
        log.warning("cannot read verify addresses", error=str(error))
        return set(before)
    for address in addresses:
        if not is_name(address):
            found.add(address)
            continue
        host, _, port = address.rpartition(":")
        try:
            entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            log.warning("cannot look up a verify address", address=address, error=str(error))
            found.update(before)  # which of them were this one's, nobody knows
        else:
            found.update(_join(entry[4][0], port) for entry in entries)
    return found


def _listed(address: str) -> list[str]:
    """The address, or those in the file that it names."""
    if not address.startswith(_FILE):
        return [address]
    lines = Path(address.removeprefix(_FILE)).read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip()]


def _join(host: str | int, port: str) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
