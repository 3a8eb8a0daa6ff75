"""Addresses of verify services as flags give them, and what they stand for at the moment.

An address may be a DNS name for several, or `file:PATH` of a file with one on each line.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from outrider.listed_lines import lines_of
from outrider.resolving import Resolver, endpoints_of, is_name

_FILE = "file:"


class Addresses:
    """The addresses given, looked up again and again; a file or name that cannot be keeps what it stood for last."""

    def __init__(self, given: Iterable[str]) -> None:
        self._given = tuple(given)
        self._files = Resolver(_listed, "cannot read verify addresses")
        self._names = Resolver(endpoints_of, "cannot look up a verify address")

    @property
    def may_change(self) -> bool:
        """Whether there is a name or a file among them."""
        return any(map(is_name, self._given))

    async def resolve(self) -> set[str]:
        """Every concrete address now."""
        return set(await self._names.resolve(await self._files.resolve(self._given)))


async def _listed(address: str) -> list[str]:
    return _lines(Path(address.removeprefix(_FILE))) if address.startswith(_FILE) else [address]


def _lines(path: Path) -> list[str]:
    """The addresses that a file lists. OSError where it has none: somebody is about to write them."""
    listed = [line for _, line in lines_of(path.read_text(encoding="utf-8"))]
    if not listed:
        raise OSError(f"{path} has no address")
    return listed
