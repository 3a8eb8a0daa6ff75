"""Certificates for tests: an authority, and what it signs, as files that may be replaced."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trustme

_PAST = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)


@dataclass
class Authority:
    """Signs certificates into a folder."""

    folder: Path
    name: str = "ca"
    ca: trustme.CA = field(default_factory=trustme.CA)

    def __post_init__(self) -> None:
        self.ca.cert_pem.write_to_path(self.path)

    @property
    def path(self) -> Path:
        """Its own certificate."""
        return self.folder / f"{self.name}.pem"

    def issue(self, name: str, *hosts: str, expired: bool = False) -> tuple[str, str]:
        """(certificate file, key file) called `name`, for these hosts; what had that name before is replaced."""
        ends = _PAST + datetime.timedelta(days=1)
        dates: dict[str, Any] = {"not_before": _PAST, "not_after": ends} if expired else {}
        made = self.ca.issue_cert(*(hosts or (name,)), **dates)
        paths = self.folder / f"{name}.cert", self.folder / f"{name}.key"
        for path, content in zip(paths, (made.cert_chain_pems[0], made.private_key_pem), strict=True):
            fresh = path.with_suffix(path.suffix + ".new")
            fresh.write_bytes(content.bytes())
            fresh.rename(path)
        return str(paths[0]), str(paths[1])
