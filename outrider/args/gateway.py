"""Flags of `outrider gateway`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from outrider.args.links import MAX_SOCKET_BYTES, DialingArgs, ServingArgs, check_address, check_tls_is_used
from outrider.args.observing import ObservingArgs
from outrider.errors import StartupError
from outrider.flags import above_zero, arg, at_least, at_most, bound_host, check_key, flag_named
from outrider.wire import MAX_GRAMMAR_BYTES

# As the gateway has them, which its tests compare; - and _ are the same.
TOOL_CALL_PARSERS = (
    "hermes", "qwen", "qwen25", "llama3", "llama3_json", "mistral", "pythonic", "qwen3_coder", "deepseekv3",
    "deepseekv31", "kimi_k2",
)  # fmt: skip
REASONING_PARSERS = (
    "deepseek-r1", "deepseek-v3", "qwen3", "qwen3-thinking", "glm45", "step3", "kimi", "mistral", "granite",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GatewayArgs(ObservingArgs, ServingArgs, DialingArgs):
    """Settings of `outrider gateway`."""

    command: ClassVar[str] = "gateway"
    summary: ClassVar[str] = "Serve the OpenAI API over HTTP in front of verify services."

    host: str = arg("127.0.0.1", "network", "Address to serve HTTP on.", read=bound_host)
    port: int = arg(8000, "network", "Port to serve HTTP on; 0 takes a free one.")
    uds: str | None = arg(None, "network", "Unix socket to serve HTTP on, instead of host and port.")
    verify_address: tuple[str, ...] = arg(
        ("127.0.0.1:50051",), "network",
        "Verify service; a DNS name, or file:PATH with one on each line, may stand for several. Repeatable.",
    )  # fmt: skip
    served_model_name: str | None = arg(
        None, "model", "Name in the API. Default: the hub id, or the model folder's name."
    )
    tokenizer_path: str | None = arg(None, "model", "Folder with tokenizer.json. Default: the verify service's model.")
    chat_template: str | None = arg(None, "model", "File with a chat template. Default: the model's.")
    tool_call_parser: str | None = arg(
        None, "model", "How the model writes calls of tools: hermes, llama3_json, mistral, pythonic, qwen3_coder, "
        "deepseekv3, kimi_k2... Default: what the chat template shows.",
    )  # fmt: skip
    reasoning_parser: str | None = arg(
        None,
        "model",
        "How the model marks its reasoning: deepseek-r1, qwen3, mistral... Default: it is not told apart.",
    )
    sampling_defaults: Literal["model", "openai"] = arg(
        "model", "model", "Temperature and the like where a request says nothing: model: as generation_config.json has "
        "them; openai: temperature 1, nothing else.",
    )  # fmt: skip
    api_key: tuple[str, ...] = arg((), "limits", "Key that clients must send. Repeatable. Default: none.")
    api_key_file: str | None = arg(
        None, "limits", "File with such keys, one on a line, each with limits of its own if need be: "
        "KEY name=WHO requests_per_minute=N tokens_per_minute=N.",
    )  # fmt: skip
    requests_per_minute: int | None = arg(None, "limits", "Requests of one key in a minute. Default: no limit.")
    tokens_per_minute: int | None = arg(
        None, "limits", "Tokens of one key in a minute, of prompts and answers. Default: no limit."
    )
    max_prompt_tokens: int | None = arg(None, "limits", "Longest prompt. Default: as the context holds.")
    max_schema_bytes: int = arg(
        MAX_GRAMMAR_BYTES,
        "limits",
        "Largest JSON schema or grammar of a request; verify takes no larger ones.",
    )
    max_body_bytes: int = arg(8 * 2**20, "limits", "Largest request body.")
    max_connections: int = arg(2048, "limits", "HTTP connections open at once, where the limit of open files allows.")
    stream_buffer_bytes: int = arg(2**20, "limits", "Bytes that wait for a slow reader before its stream is dropped.")
    receive_timeout_s: float = arg(30.0, "limits", "Time for a request's headers to arrive, and again for its body.")
    request_timeout_s: float = arg(600.0, "limits", "Time for an answer, waiting included.")
    max_failovers: int = arg(
        4,
        "limits",
        "Times in a row, no token between them, that an answer is tried again when its verify service broke.",
    )
    failover_patience_s: float = arg(
        30.0, "limits", "Time that an answer whose verify service broke waits for one that serves."
    )
    strict_fields: bool = arg(False, "limits", "Refuse unknown body fields instead of ignoring them.")
    shutdown_grace_s: float = arg(30.0, "network", "Time that running requests get to finish on SIGTERM.")
    drain_delay_s: float = arg(
        0.0, "network",
        "Time before that in which /health says 503 and requests are taken still, so that a balancer notices.",
    )  # fmt: skip

    def check(self) -> None:
        """StartupError for values out of bounds."""
        super().check()
        self._check_uds()
        if self.served_model_name == "":
            raise StartupError("--served-model-name is empty; leave it out for the model's own")
        for address in self.verify_address:
            if address == "file:":
                raise StartupError("--verify-address is 'file:'; a path must follow")
            if not address.startswith("file:"):
                check_address("--verify-address", address)
        check_tls_is_used("--verify-ssl-ca-certs", self.verify_ssl_ca_certs, self.verify_address)
        at_least(self, 0, "port", "shutdown_grace_s", "drain_delay_s", "max_failovers", "failover_patience_s")
        above_zero(self, "receive_timeout_s", "request_timeout_s")
        at_least(
            self, 1, "max_body_bytes", "max_connections", "stream_buffer_bytes", "requests_per_minute",
            "tokens_per_minute", "max_prompt_tokens", "max_schema_bytes",
        )  # fmt: skip
        at_most(self, 65535, "port")
        at_most(self, MAX_GRAMMAR_BYTES, "max_schema_bytes")
        _check_name("--tool-call-parser", self.tool_call_parser, TOOL_CALL_PARSERS)
        _check_name("--reasoning-parser", self.reasoning_parser, REASONING_PARSERS)
        for key in self.api_key:
            check_key("--api-key", key)
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            raise StartupError(f"--chat-template is {self.chat_template!r}, which is no file")

    def _check_uds(self) -> None:
        """StartupError for a socket that cannot be, and for what would do nothing beside one."""
        if self.uds is None:
            return
        if self.ssl_certfile is not None:
            raise StartupError("--ssl-certfile is for --host and --port; --uds goes without TLS")
        for name in ("host", "port"):
            if getattr(self, name) != getattr(GatewayArgs, name):
                raise StartupError(f"{flag_named(name)} and --uds exclude each other; give one")
        if not self.uds:
            raise StartupError("--uds is empty; it must be a path")
        if len(os.fsencode(self.uds)) > MAX_SOCKET_BYTES:
            raise StartupError(f"--uds is {self.uds!r}; a socket's path has at most {MAX_SOCKET_BYTES} bytes")


def _check_name(flag: str, name: str | None, known: tuple[str, ...]) -> None:
    if name is not None and name.lower().replace("_", "-") not in {one.replace("_", "-") for one in known}:
        raise StartupError(f"{flag} is {name!r}; it must be one of {', '.join(known)}")
