"""Flags of `outrider drafters`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outrider.algorithms import WIRE_ALGORITHMS
from outrider.args.links import DialingArgs, check_address, check_tls_is_used
from outrider.errors import StartupError
from outrider.flags import above_zero, arg


@dataclass(frozen=True, kw_only=True)
class DraftersArgs(DialingArgs):
    """Settings of `outrider drafters`."""

    command: ClassVar[str] = "drafters ACTION"
    summary: ClassVar[str] = (
        "Manage a running verify service's drafters. ACTION is list, or one of drain (no new sessions), disable (none "
        "at all) and enable, for --drafter or --algorithm. Answers stay the same; only their speed may change."
    )

    verify_address: tuple[str, ...] = arg(
        ("127.0.0.1:50051",), "connection", "Verify service: host:port or unix:/path. Repeatable."
    )
    admin_token_file: str | None = arg(
        None, "connection", "File with the operator's token. Default: none, as Unix sockets need none."
    )
    timeout_s: float = arg(10.0, "connection", "Time for an answer.")
    drafter: str | None = arg(None, "what", "The drafter, as list shows it.")
    algorithm: str | None = arg(
        None, "what", "All drafters of one algorithm, and those that come later: NGRAM, EAGLE3..."
    )

    def check(self) -> None:
        """StartupError for flags that do not go together."""
        super().check()
        for address in self.verify_address:
            check_address("--verify-address", address)
        check_tls_is_used("--verify-ssl-ca-certs", self.verify_ssl_ca_certs, self.verify_address)
        if self.algorithm is not None and self.algorithm.upper() not in WIRE_ALGORITHMS:
            raise StartupError(f"--algorithm is {self.algorithm!r}; it must be one of {', '.join(WIRE_ALGORITHMS)}")
        if self.drafter is not None and self.algorithm is not None:
            raise StartupError("--drafter and --algorithm exclude each other; give one")
        above_zero(self, "timeout_s")
