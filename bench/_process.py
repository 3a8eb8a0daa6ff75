"""Processes of a benchmark that are spoken to over gRPC or a Unix socket; bench/_server.py has those of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from typing import NoReturn

from bench._load import first_cause
from outrider import env
from outrider.errors import StartupError
from outrider.v1 import verify_pb2, verify_pb2_grpc

_ENLIST_TIMEOUT_S = 60.0
_POLL_S = 0.02
_ENDING_S = 10.0  # after which a process that was told to end is killed


@contextlib.asynccontextmanager
async def process(*words: str) -> AsyncIterator[int]:
    """`python -m` these words, once it has said a line; its id. Told to end, and waited for, at the block's exit.

    StartupError for one that ends before, which ends the block too, and for one that ends badly; why is on stderr.
    """
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", *words, stdin=DEVNULL, stdout=PIPE,
        env={"OUTRIDER_LOG_LEVEL": "warning", **env.for_child()}, start_new_session=True,  # Ctrl-C is told to us alone
    )  # fmt: skip
    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(_watch(child, words))
            assert child.stdout is not None
            if not await child.stdout.readline():
                await watching
            yield child.pid
            watching.cancel()
    except ExceptionGroup as failed:
        raise first_cause(failed) from failed
    finally:
        await _end(child)
    if child.returncode != 0:
        await _watch(child, words)


async def _watch(child: Process, words: tuple[str, ...]) -> NoReturn:
    """StartupError as soon as it has ended."""
    code = await child.wait()
    name = " ".join(words[:2]) if words[0] == "outrider" else words[0]
    raise StartupError(f"{name} ended with {code}")


async def _end(child: Process) -> None:
    """SIGTERM, and SIGKILL where that does not help in time."""
    for signal in (child.terminate, child.kill):
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ENDING_S):
                    await child.wait()


async def enlisted(stub: verify_pb2_grpc.VerifyServiceAsyncStub) -> None:
    """Waits for a drafter. StartupError when none comes."""
    request = verify_pb2.VerifyServiceGetServerInfoRequest()
    try:
        async with asyncio.timeout(_ENLIST_TIMEOUT_S):
            while not (await stub.GetServerInfo(request)).drafters:  # noqa: ASYNC110  none tells
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise StartupError(f"no drafter enlisted in {_ENLIST_TIMEOUT_S:.0f} s") from None
