"""`outrider serve`: verify, draft and gateway as three processes on this machine, joined by private Unix sockets."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import shlex
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from outrider.args import HEAD_ALGORITHMS, DraftArgs, GatewayArgs, ServeArgs, VerifyArgs
from outrider.args.draft import OF_DRAFT_MODELS
from outrider.args.links import host_port, is_socket
from outrider.asked_child import answer_of
from outrider.auth import token_file
from outrider.child_output import to_stderr
from outrider.colocated import Colocated
from outrider.errors import StartupError
from outrider.placement import cores_of_two
from outrider.preflight import check_before_start
from outrider.readiness import any_certificate, model_name, wait_both, wait_enlisted, wait_healthy, wait_serving
from outrider.runtime_dir import runtime_dir
from outrider.serving import check_free, resolved
from outrider.supervisor import Part, PartFailed, Supervisor
from outrider.telemetry import announce, configure_logging

_END_MARGIN_S = 5.0  # beside the grace that running requests get
_NO_TLS: dict[str, Any] = {"ssl_certfile": None, "ssl_keyfile": None, "ssl_ca_certs": None}


@dataclass(frozen=True)
class Served:
    """What runs once all parts serve."""

    url: str
    model: str
    stop: Callable[[], None]
    verify: str = ""  # its gRPC address for this machine
    grpc: str | None = None  # the one for clients
    metrics: tuple[str, ...] = ()  # where each part tells its own, verify's first and the gateway's last


def main(args: ServeArgs) -> int:
    """Serves until told to stop. Returns the exit code."""
    configure_logging("serve")
    check_before_start(args)
    started = time.monotonic()

    async def when_ready(served: Served) -> None:
        for line in ready_lines(args, served, time.monotonic() - started):
            announce(line)

    return asyncio.run(serve(args, when_ready))


def ready_lines(args: ServeArgs, served: Served, ready_s: float) -> list[str]:
    """What whoever started it is told once all parts serve."""
    drafts = f"{args.algorithm} drafts" if args.drafts else "no drafts"
    lines = [
        f"Outrider serves {served.model} with {drafts} at {served.url} (ready in {ready_s:.1f} s)",
        f"Metrics at {' '.join(served.metrics)}",
    ]
    if served.grpc is not None:
        lines.append(f"gRPC at {served.grpc}")
    if args.drafts:
        token = f" --admin-token-file={shlex.quote(args.admin_token_file)}" if args.admin_token_file else ""
        lines.append(f"Drafters: outrider drafters list --verify-address={served.verify}{token}")
    return lines


class Settings(Protocol):
    """What a part is started with."""

    command: ClassVar[str]

    def to_argv(self) -> list[str]:
        """The settings as command-line words."""
        ...


def command_of(settings: Settings) -> tuple[str, ...]:
    """The words that start a part, which shows as `outrider NAME` in a list of processes. -P: the folder one happens to
    be in hides no package."""
    return (sys.executable, "-P", "-m", "outrider", settings.command, *settings.to_argv())


CommandOf = Callable[[Settings], tuple[str, ...]]


async def serve(
    args: ServeArgs, when_ready: Callable[[Served], Awaitable[None]], command: CommandOf = command_of
) -> int:
    """Runs the parts; awaits `when_ready` once all serve. Returns the exit code.

    `command` gives the words that start a part with its settings.
    Raises StartupError when the port is taken or the parts do not become ready in time.
    """
    with contextlib.ExitStack() as held:
        port = choose_port(args.host, args.port, held)
        metrics = choose_metrics_ports(args, held)
        args = replace(args, grpc_address=choose_grpc_address(args.grpc_address, held))
        return await _serve(args, when_ready, command, port, metrics)


async def _serve(
    args: ServeArgs, when_ready: Callable[[Served], Awaitable[None]], command: CommandOf, port: int,
    metrics: tuple[int, int],
) -> int:  # fmt: skip
    features = await features_of(args, command)
    tokens = token_file(args.token_file, "--token-file")
    grace_s = VerifyArgs.shutdown_grace_s if args.shutdown_grace_s is None else args.shutdown_grace_s
    with runtime_dir() as folder:
        verify = f"unix:{folder}/verify.sock"
        supervisor = Supervisor(
            parts_of(args, verify, f"unix:{folder}/draft.sock", port, command, features=features, metrics=metrics),
            startup_timeout_s=args.startup_timeout_s,
            stop_timeout_s=args.drain_delay_s + grace_s + _END_MARGIN_S,
        )

        async def report() -> None:
            model = args.served_model_name
            if model is None:
                model = await _within(
                    args.startup_timeout_s, model_name(verify, tokens.metadata() if tokens is not None else ())
                )
            url = f"http{'s' if args.ssl_certfile else ''}://{host_port(args.host, port)}"
            told = metrics_of(args, url, metrics)
            await when_ready(Served(url, model, supervisor.stop, verify, args.grpc_address, told))

        try:
            return await supervisor.run(report)
        except PartFailed as failure:
            to_stderr(f"outrider serve: {failure}\n".encode())
            return failure.exit_code


async def _within(timeout_s: float, asked: Awaitable[str]) -> str:
    try:
        async with asyncio.timeout(timeout_s):
            return await asked
    except TimeoutError:
        raise StartupError(f"verify did not say within {timeout_s:g} s which model it has") from None


async def features_of(args: ServeArgs, command: CommandOf = command_of) -> str:
    """What verify must keep for the drafters: as the flag says, or as a draft process that is asked does, which may
    have to fetch models first.

    Raises StartupError, with that process's words, when its draft model cannot be used, or when it takes too long, and
    SystemExit where a signal comes meanwhile.
    """
    if args.features != "auto":
        return args.features
    if args.algorithm not in HEAD_ALGORITHMS:
        return "none"
    words = command(_draft_args(args, describe=True, **_NO_TLS))
    try:
        out = await answer_of(DraftArgs.command, words, timeout_s=args.startup_timeout_s)
    except TimeoutError:
        raise StartupError(f"the draft model could not be looked at within {args.startup_timeout_s:g} s") from None
    return json.loads(out.splitlines()[-1])["features"]


def _draft_args(args: ServeArgs, **fixed: object) -> DraftArgs:
    """The draft part's settings; a draft model's attention is the target's where none is named."""
    if args.algorithm not in ("NGRAM", "NONE"):
        target = None if args.attention_backend == "auto" else args.attention_backend
        fixed["speculative_draft_attention_backend"] = args.speculative_draft_attention_backend or target
    else:
        # Verify's alone: nothing drafts with a model.
        fixed |= {name: getattr(DraftArgs, name) for name in OF_DRAFT_MODELS}
    return args.part(DraftArgs, speculative_algorithm=args.algorithm, **fixed)


def parts_of(
    args: ServeArgs, verify: str, draft: str, port: int, command: CommandOf = command_of, *, features: str = "none",
    metrics: tuple[int, int] | None = None,
) -> list[Part]:  # fmt: skip
    """The processes, those that others rely on first. `verify` and `draft` are gRPC addresses.

    metrics: the ports of verify's and of draft's; the gateway's are where its HTTP is.
    """
    verify_port, draft_port = metrics or (None, None)
    placed = args.core_placement != "off" and args.drafts and not args.colocate
    verify_core, draft_core = (cores_of_two() if placed else None) or (None, None)
    tokens = token_file(args.token_file, "--token-file")
    target = args.part(
        VerifyArgs, listen=verify, features=features, metrics_port=verify_port, core=verify_core,
        disable_speculation_brake=args.disable_speculation_brake or args.fixes_tree,
        **({} if args.grpc_is_tls else _NO_TLS),
    )  # fmt: skip
    parts = [_part(target, lambda: wait_serving(verify), command, grpc_speaks=args.grpc_is_tls)]
    if args.drafts:
        own = _draft_args(
            args, listen=draft, verify_address=(verify,), metrics_port=draft_port, core=draft_core, **_NO_TLS
        )
        if args.colocate:
            both = Colocated(target, replace(own, verify_address=DraftArgs.verify_address))
            parts = [_part(both, lambda: wait_both(verify, draft, tokens), command, grpc_speaks=args.grpc_is_tls)]
        else:
            parts.append(_part(own, lambda: wait_enlisted(draft, tokens), command, disposable=True))
    gateway = args.part(GatewayArgs, port=port, verify_address=(verify,), metrics_port=None)
    tls = None if args.ssl_certfile is None else any_certificate()
    return [*parts, _part(gateway, lambda: wait_healthy(_dial_host(args.host), port, tls), command)]


def _part(
    settings: Settings, ready: Callable[[], Awaitable[None]], command: CommandOf, *, disposable: bool = False,
    grpc_speaks: bool = False,
) -> Part:  # fmt: skip
    return Part(settings.command, command(settings), ready, disposable, grpc_speaks)


def choose_port(host: str, port: int, held: contextlib.ExitStack) -> int:
    """`port`, or a free one for 0, which no connection takes by chance while it is `held`; a part may listen there.

    StartupError at once when it cannot be had, not after the model was loaded.
    """
    if not 0 <= port < 2**16:
        raise StartupError(f"--port is {port}; it must be from 0 to 65535")
    return held.enter_context(_bound(host, port)).getsockname()[1]


def _bound(host: str, port: int) -> socket.socket:
    """A socket bound there, in the way that lets another one listen. StartupError when it cannot be."""
    try:
        family, address = resolved(host, port)
        probe = socket.socket(family, socket.SOCK_STREAM)
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
        except OSError:
            probe.close()
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            reason += "; name another port, or 0 for one that is free"
        raise StartupError(f"cannot listen on {host_port(host, port)}: {reason}") from error
    return probe


def choose_grpc_address(address: str | None, held: contextlib.ExitStack) -> str | None:
    """`address` with a free port for 0, held as choose_port does it; StartupError at once when it cannot be had."""
    if address is None:
        return None
    if is_socket(address):
        check_free(address)
        return address
    host, _, port = address.rpartition(":")
    return f"{host}:{held.enter_context(_bound(host.strip('[]'), int(port))).getsockname()[1]}"


def choose_metrics_ports(args: ServeArgs, held: contextlib.ExitStack) -> tuple[int, int]:
    """The metrics ports of verify and draft: --metrics-port's, or two free ones. StartupError when they cannot be
    had."""
    first, second = (args.metrics_port, args.metrics_port + 1) if args.metrics_port else (0, 0)
    return choose_port(args.metrics_host, first, held), choose_port(args.metrics_host, second, held)


def metrics_of(args: ServeArgs, url: str, ports: tuple[int, int]) -> tuple[str, ...]:
    """The addresses of the parts' metrics."""
    host = _dial_host(args.metrics_host)
    used = ports if args.drafts else ports[:1]
    return (*(f"http://{host_port(host, port)}/metrics" for port in used), f"{url}/metrics")


def _dial_host(host: str) -> str:
    """Where to reach a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
