"""Certificates for tests: an authority and the files that it signs, which may be replaced."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trustme

from outrider.args import VerifyArgs
from tests.files import replace

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
        """The authority's own certificate."""
        return self.folder / f"{self.name}.pem"

    def issue(self, name: str, *hosts: str, expired: bool = False) -> tuple[str, str]:
        """Writes a certificate called `name` for these hosts, over an older one; its file and the key's."""
        ends = _PAST + datetime.timedelta(days=1)
        dates: dict[str, Any] = {"not_before": _PAST, "not_after": ends} if expired else {}
        made = self.ca.issue_cert(*(hosts or (name,)), **dates)
        paths = self.folder / f"{name}.cert", self.folder / f"{name}.key"
        for path, content in zip(paths, (made.cert_chain_pems[0], made.private_key_pem), strict=True):
            fresh = path.with_suffix(path.suffix + ".new")
            fresh.write_bytes(content.bytes())
            fresh.rename(path)
        return str(paths[0]), str(paths[1])


@dataclass(frozen=True)
class MutualTls:
    """Settings of a verify service, and of a caller with a certificate and a token that is not yet the right one.

    client: the flags of DraftArgs or GatewayArgs. The server's certificate is for `localhost`.
    """

    authority: Authority
    verify: VerifyArgs
    client: dict[str, Any]

    @classmethod
    def between(cls, folder: Path, client: str, *, expired: bool = False) -> MutualTls:
        """Makes the files in `folder`; `client` names the caller, whose certificate is `expired` or not."""
        authority = Authority(folder)
        (server_cert, server_key), (cert, key) = authority.issue("localhost"), authority.issue(client, expired=expired)
        ours, theirs = folder / "ours", folder / "theirs"
        ours.write_text("a-token-that-is-not-known")
        theirs.write_text("a-token-between-services")
        verify = VerifyArgs(
            listen="127.0.0.1:0", ssl_certfile=server_cert, ssl_keyfile=server_key, ssl_ca_certs=str(authority.path),
            token_file=str(theirs),
        )  # fmt: skip
        dialling = {
            "verify_ssl_ca_certs": str(authority.path), "verify_ssl_certfile": cert, "verify_ssl_keyfile": key,
            "token_file": str(ours),
        }  # fmt: skip
        return cls(authority, verify, dialling)

    def correct_token(self) -> None:
        """Gives the caller the token that the service knows."""
        replace(Path(self.client["token_file"]), "a-token-between-services")
