"""`outrider colocated`: verify and draft in one process, their stream kept in memory. For small machines.

The services are what they are apart; between them is outrider/in_memory.py in place of a socket. They share an event
loop, and Python's lock with the engine's thread: drafting in Python holds up verifying, which two processes on two
cores would do at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import time
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import structlog
import uvloop

from outrider import env
from outrider.args import DraftArgs, VerifyArgs
from outrider.args.links import check_address
from outrider.backoff import of_restarts
from outrider.errors import StartupError
from outrider.flags import flag_of
from outrider.in_memory import InMemoryServer
from outrider.preflight import check_before_load
from outrider.process_tuning import free_what_ended, keep_steady
from outrider.serving import check_free
from outrider.stopping import Stopping, on_signals
from outrider.telemetry import configure_logging, get_logger
from outrider.v1 import verify_pb2_grpc

log = get_logger(__name__)

SEPARATOR = "--"
_OF_ONE_APART = (
    "verify_address", "describe", "inspect", "verify_ssl_ca_certs", "verify_ssl_certfile", "verify_ssl_keyfile",
    "verify_ssl_server_name",
)  # fmt: skip


@dataclass(frozen=True)
class Colocated:
    """The settings of both services, as words: verify's, `--`, draft's."""

    command: ClassVar[str] = "colocated"
    verify: VerifyArgs
    draft: DraftArgs

    @classmethod
    def parse(cls, words: list[str]) -> Colocated:
        """The settings of a command line's words. StartupError without both halves."""
        if SEPARATOR not in words:
            raise StartupError("give the flags of `outrider verify`, then `--`, then those of `outrider draft`")
        at = words.index(SEPARATOR)
        verify, draft = VerifyArgs.parse(words[:at]), DraftArgs.parse(words[at + 1 :])
        for spec in dataclasses.fields(draft):
            if spec.name in _OF_ONE_APART and getattr(draft, spec.name) != spec.default:
                raise StartupError(f"{flag_of(spec)} is for a draft service that is apart from its verify service")
        check_address("--listen", verify.listen)  # which draft's lines call verify by
        return cls(verify, draft)

    def to_argv(self) -> list[str]:
        """The settings as command-line words."""
        return [*self.verify.to_argv(), SEPARATOR, *self.draft.to_argv()]


def main(words: list[str]) -> int:
    """Runs the process; returns its exit code."""
    settings = Colocated.parse(words)
    configure_logging("verify")
    for part in (settings.verify, settings.draft):
        check_before_load(part)
        check_free(part.listen, *part.metrics_addresses)
    check_free(*filter(None, [settings.verify.grpc_address]))
    # By name, as the command line and the launcher do it: this package knows no service.
    draft: Any = importlib.import_module("draft_service.app")
    draft.cache_kernels(env.home() / "numba")
    verify: Any = importlib.import_module("verify_service.app")
    model = verify.load_model(settings.verify)
    with structlog.contextvars.bound_contextvars(service="draft"):
        loaded = [draft.load(settings.draft)]
    keep_steady()
    return uvloop.run(_serve(settings, verify, model, draft, loaded))


async def _serve(settings: Colocated, verify: Any, model: Any, draft: Any, loaded: list[Any]) -> int:
    """Serves verify for as long as it lives, and draft beside it; told to stop, draft leaves first."""
    verifying, drafting = Stopping(), Stopping()
    on_signals(lambda: _stop(verifying, drafting))
    ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    verify_task = asyncio.create_task(verify.serve(settings.verify, model, verifying, ready.set_result))
    await asyncio.wait([ready, verify_task], return_when=asyncio.FIRST_COMPLETED)
    if not ready.done():
        return await verify_task
    memory = InMemoryServer()
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(ready.result(), memory)  # pyright: ignore[reportArgumentType]
    draft_args = replace(settings.draft, verify_address=(settings.verify.listen,))  # what its lines call verify
    draft_task = asyncio.create_task(_keep_drafting(draft_args, draft, loaded, drafting, memory))
    await asyncio.wait([verify_task, draft_task], return_when=asyncio.FIRST_COMPLETED)
    drafting.ask()
    if verify_task.done():
        drafting.ask()  # at once: there is nobody to draft for
    try:
        await draft_task
    finally:
        verifying.ask()
        code = await verify_task
    return code


def _stop(verifying: Stopping, drafting: Stopping) -> None:
    """Ends draft, then verify; the second time neither waits."""
    if drafting.asked.is_set():
        verifying.ask()
    drafting.ask()


async def _keep_drafting(
    args: DraftArgs, draft: Any, loaded: list[Any], stopping: Stopping, memory: InMemoryServer
) -> None:  # fmt: skip
    """Serves draft until it is told to stop. Once it has served, it is begun again when it fails, after pauses that
    grow as long as it fails soon.

    loaded: what it begins with, which is taken out of it, so that nobody keeps its memory.
    """
    structlog.contextvars.bind_contextvars(service="draft")
    backoff = of_restarts()

    async def serve() -> bool:
        began_s = time.monotonic()
        try:
            return bool(await draft.serve(args, loaded.pop(), lambda: stopping, memory.dial))
        finally:
            backoff.lasted(time.monotonic() - began_s)

    failed = await serve()
    while failed and not stopping.asked.is_set():
        pause_s = backoff.next_s()
        log.error("drafting failed; it begins again", pause_s=pause_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await stopping.asked.wait()
                return
        free_what_ended()
        try:
            loaded.append(await asyncio.to_thread(draft.load, args))  # verify goes on meanwhile
            failed = await serve()
        except Exception as error:
            log.error("drafting cannot begin again", exc_info=error)
