"""Addresses of verify services as flags give them, and what they stand for at the moment.

An address may be a DNS name for several, or `file:PATH` of a file with one on each line.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from outrider.args.links import check_address
from outrider.errors import StartupError
from outrider.file_stamp import check_regular
from outrider.listed_lines import lines_of
from outrider.resolving import Resolver, endpoints_of, is_name

_FILE = "file:"


class Addresses:
    """The addresses given, looked up again and again; a file, line or name that cannot be keeps what it stood for last.

    So does a file of which every line stands for nothing.
    """

    def __init__(self, given: Iterable[str]) -> None:
        self._given = tuple(given)
        self._files = Resolver(self._listed, "cannot read verify addresses")
        self._names = Resolver(endpoints_of, "cannot look up a verify address")
        self._lines = {
            address: Resolver(_endpoints_of_line, f"cannot use a line of {address.removeprefix(_FILE)}")
            for address in self._given
            if address.startswith(_FILE)
        }

    @property
    def may_change(self) -> bool:
        """Whether there is a name or a file among them."""
        return any(map(is_name, self._given))

    async def resolve(self) -> set[str]:
        """Every concrete address now."""
        return set(await self._names.resolve(await self._files.resolve(self._given)))

    async def _listed(self, address: str) -> list[str]:
        """What a file's lines stand for, any other address itself. OSError where they stand for nothing."""
        if (lines := self._lines.get(address)) is None:
            return [address]
        path = Path(address.removeprefix(_FILE))
        if not (found := await lines.resolve(_read(path))):
            raise OSError(f"no line of {path} stands for an address")
        return found


def _read(path: Path) -> list[str]:
    """The addresses that a file lists. OSError where it has none: somebody is about to write them."""
    check_regular(path)
    listed = [line for _, line in lines_of(path.read_text(encoding="utf-8"))]
    if not listed:
        raise OSError(f"{path} has no address")
    return listed


async def _endpoints_of_line(line: str) -> list[str]:
    try:
        check_address("it", line)
    except StartupError as error:
        raise OSError(error.message) from error
    return await endpoints_of(line)
