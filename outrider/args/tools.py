"""Flags of the commands that serve nothing: `outrider chat`, `outrider convert`, `outrider health`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outrider.args.links import DialingArgs, check_address
from outrider.errors import StartupError
from outrider.flags import Args, above_zero, arg, at_least, check_key, check_url


@dataclass(frozen=True, kw_only=True)
class ChatArgs(Args):
    """Settings of `outrider chat`."""

    command: ClassVar[str] = "chat"
    summary: ClassVar[str] = "Chat with a running server; the answer's tokens are coloured by where they came from."

    url: str = arg("http://127.0.0.1:8000", "connection", "Address of the gateway; an OpenAI base URL will do.")
    api_key: str | None = arg(None, "connection", "Key, where the server asks for one.")
    ssl_ca_certs: str | None = arg(
        None, "connection", "Authorities (PEM) of the server's certificate. Default: those of this machine."
    )
    model: str | None = arg(None, "connection", "Model to talk to. Default: the first that the server names.")
    prompt: str | None = arg(None, "conversation", "Ask this once and end, instead of a conversation.")
    system: str | None = arg(None, "conversation", "System message.")
    max_tokens: int | None = arg(None, "conversation", "Longest answer, in tokens. Default: as the context allows.")
    temperature: float = arg(0.0, "conversation", "Sampling temperature; 0 always takes the likeliest token.")
    no_speculation: bool = arg(False, "conversation", "Ask the server to decode plainly.")

    def check(self) -> None:
        """StartupError for values out of bounds."""
        at_least(self, 1, "max_tokens")
        at_least(self, 0, "temperature")
        check_url("--url", self.url, "http://127.0.0.1:8000")
        if self.ssl_ca_certs is not None and not self.url.lower().startswith("https:"):
            raise StartupError(f"--ssl-ca-certs is for https; --url is {self.url}")
        if self.api_key is not None:
            check_key("--api-key", self.api_key)


@dataclass(frozen=True, kw_only=True)
class ConvertArgs(Args):
    """Settings of `outrider convert`."""

    command: ClassVar[str] = "convert"
    summary: ClassVar[str] = "Write a published draft head (EAGLE's own files, speculators', SGLang's) as safetensors."

    source: str | None = arg(None, "files", "Folder or hub id of the head.")
    destination: str | None = arg(None, "files", "Folder to write, which must not exist.")
    revision: str | None = arg(None, "files", "Revision of the hub id.")

    def check(self) -> None:
        """StartupError unless both sides are given."""
        for name in ("source", "destination"):
            if getattr(self, name) is None:
                raise StartupError(f"--{name} is needed")


@dataclass(frozen=True, kw_only=True)
class HealthArgs(DialingArgs):
    """Settings of `outrider health`. Services answer it without a token."""

    command: ClassVar[str] = "health"
    summary: ClassVar[str] = "Say whether services answer: exit code 0 when all do, else 1."

    address: tuple[str, ...] = arg((), "services", "gRPC address of a verify or draft service. Repeatable.")
    url: tuple[str, ...] = arg((), "services", "Whole URL that must answer 200: a gateway's /health. Repeatable.")
    timeout_s: float = arg(3.0, "services", "Time for an answer.")
    verify_ssl_ca_certs: str | None = arg(
        None, "security",
        "Authorities (PEM) of the certificates of all that is asked, gateways too; --address is dialled over TLS "
        "then. Default: none, and for https those of this machine.",
    )  # fmt: skip
    verify_ssl_certfile: str | None = arg(None, "security", "Certificate (PEM) to show them.")

    def check(self) -> None:
        """StartupError where nothing is asked."""
        super().check()
        if not self.address and not self.url:
            raise StartupError("--address or --url is needed")
        for address in self.address:
            check_address("--address", address)
        for url in self.url:
            check_url("--url", url, "http://127.0.0.1:8000/health")
        above_zero(self, "timeout_s")
