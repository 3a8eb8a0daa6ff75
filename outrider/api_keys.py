"""The keys of --api-key-file, as the gateway takes them and `outrider serve` looks at them before it starts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import StartupError
from outrider.flags import check_key
from outrider.listed_lines import WatchedFile

_SETTINGS = ("requests_per_minute", "tokens_per_minute")


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """A key as it was given, with limits of its own."""

    key: str
    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class KeyFile(WatchedFile[KeyEntry]):
    """The keys of --api-key-file: one a line, then settings as NAME=VALUE."""

    listed = "keys"

    def __init__(self, path: str) -> None:
        super().__init__(path, "--api-key-file")

    def _parsed(self, lines: list[tuple[int, str]]) -> list[KeyEntry]:
        words = [(number, line.split()) for number, line in lines]
        entries = [_entry(key, settings, f"{self._path}, line {number}") for number, (key, *settings) in words]
        if not entries:
            raise StartupError(f"--api-key-file {self._path} has no key")
        return entries


def _entry(key: str, settings: Sequence[str], where: str) -> KeyEntry:
    check_key(where, key)
    name, limits = f"key-{hashlib.sha256(key.encode()).hexdigest()[:8]}", {}
    for setting in settings:
        word, _, value = setting.partition("=")
        if word == "name" and value:
            name = value
        elif word in _SETTINGS and value.isdecimal() and int(value) > 0:
            limits[word] = int(value)
        else:
            raise StartupError(f"{where}: settings are name=TEXT, {'=N, '.join(_SETTINGS)}=N")
    return KeyEntry(key, name, **limits)
