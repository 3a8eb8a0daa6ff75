"""Chat templates, rendered in worker processes that can be killed."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider import env, isolated, template_worker
from outrider.errors import InvalidArgument, OutriderError, StartupError, Unavailable
from outrider.telemetry import get_logger
from outrider.template_worker import (
    OUT_OF_TIME,
    TIME_LIMIT_S,
    WALL_FACTOR,
    Failed,
    Load,
    Loaded,
    Render,
    Rendered,
    Reply,
    frame,
    was_killed,
)
from outrider.text_files import DEFAULT, TOOL_USE, find_templates, token_variables

log = get_logger(__name__)

NUM_WORKERS = 2
_SELF_TEST = [{"role": "user", "content": "Hello."}]
_SELF_TEST_SYSTEM = {"role": "system", "content": "Be brief, please."}
_SELF_TEST_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}},
}
_SELF_TEST_CHARS = 2**20


class TemplateFailed(OutriderError):
    """A render took too long, or ended its worker otherwise."""

    http_status = 500
    final = True


class WorkerLost(Unavailable):
    """A worker was killed, or does not answer: the machine's doing, as far as is known, and not the template's."""


class RenderTooLong(InvalidArgument):
    """The template wrote more than it may: who knows the context says how long that is."""


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def spawn(cls) -> _Worker:
        """A new process, which speaks over a socket pair.

        By subprocess and not by the event loop's own call: that one forks, which gRPC's threads do not like.
        Unavailable where the system gives no process, or nothing to speak over.
        """
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                return await cls._beside(ours, theirs)
        except OSError as error:
            raise Unavailable(f"No process can be started for the chat template: {error.strerror or error}.") from error

    @classmethod
    async def _beside(cls, ours: socket.socket, theirs: socket.socket) -> _Worker:
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        end = theirs.fileno()
        try:
            command = isolated.command(template_worker, packages=template_worker.PACKAGES)
            process = subprocess.Popen(command, stdin=end, stdout=end, env=env.for_worker())  # noqa: ASYNC220
        except BaseException:
            writer.close()
            raise
        return cls(process, reader, writer)

    async def ask(self, request: Load | Render) -> Reply:
        """One exchange; EOFError or OSError when the process is gone."""
        self.writer.write(frame(request))
        await self.writer.drain()
        size = template_worker.body_size(await self.reader.readexactly(template_worker.HEADER_BYTES))
        return template_worker.reply_of(await self.reader.readexactly(size))

    async def kill(self) -> None:
        """Ends the process and waits for it."""
        self.writer.close()
        self.process.kill()
        await asyncio.to_thread(self.process.wait)


@dataclass(slots=True)
class ChatTemplate:
    """Renders one template in up to NUM_WORKERS processes. `start` first.

    `strings` are the template's own literals; `takes_tools` tells whether it has words for tools, `takes_system`
    whether it writes a system message, which some refuse. `tool_use` is the one to take where tools are offered, if not
    this.
    """

    source: str
    variables: Mapping[str, str]
    time_limit_s: float = TIME_LIMIT_S
    strings: tuple[str, ...] = ()
    takes_tools: bool = False
    takes_system: bool = True
    tool_use: ChatTemplate | None = None
    _idle: list[_Worker] = field(default_factory=list)
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(NUM_WORKERS))

    @classmethod
    def of_folder(cls, folder: Path, given: Path | None) -> ChatTemplate | None:
        """The template of a model folder, or of the file given; None without any."""
        sources, variables = find_templates(folder, given), token_variables(folder)
        if DEFAULT not in sources:
            return None
        tool_use = cls(sources[TOOL_USE], variables) if TOOL_USE in sources else None
        return cls(sources[DEFAULT], variables, tool_use=tool_use)

    def chosen(self, *, tools: bool) -> ChatTemplate:
        """The template for a conversation that does or does not offer tools."""
        return self.tool_use if tools and self.tool_use is not None else self

    def all(self) -> tuple[ChatTemplate, ...]:
        """This one, and `tool_use`."""
        return (self,) if self.tool_use is None else (self, self.tool_use)

    async def start(self) -> None:
        """Compiles the template and tries it; StartupError (code template_error) when it cannot be rendered.

        One that refuses what it is tried with may take other conversations.
        """
        try:
            await self._start({})
            if self.tool_use is not None:
                await self.tool_use._start({"tools": [_SELF_TEST_TOOL]})
        except BaseException:
            await self.close()
            raise

    async def _start(self, given: dict[str, Any]) -> None:
        context = {"messages": _SELF_TEST, "add_generation_prompt": True, **given}
        with_system = {**context, "messages": [_SELF_TEST_SYSTEM, *_SELF_TEST]}
        try:
            reply = await self._rendered(Render(context, _SELF_TEST_CHARS))
            answer = await self._rendered(Render(with_system, _SELF_TEST_CHARS))
            self.takes_system = isinstance(answer, Rendered) and _SELF_TEST_SYSTEM["content"] in answer.text
        except OutriderError as error:
            raise StartupError(f"the chat template does not work: {error.message}", code="template_error") from error
        if isinstance(reply, Failed) and reply.kind != "refused":
            reason = reply.message or "it writes without end"
            raise StartupError(f"the chat template does not work: {reason}", code="template_error")
        if isinstance(reply, Failed) and isinstance(answer, Failed):
            log.warning(
                "the chat template refuses a user's message, alone and after a system message", reason=reply.message
            )

    async def render(self, context: dict[str, Any], max_chars: int) -> str:
        """The conversation as text. InvalidArgument when the template refuses it, RenderTooLong past `max_chars`."""
        async with self._slots:
            reply = await self._rendered(Render(context, max_chars))
        if isinstance(reply, Rendered):
            return reply.text
        assert isinstance(reply, Failed)
        raise _failure(reply)

    async def _rendered(self, request: Render) -> Reply:
        """A worker's reply; where it is lost, another one's."""
        try:
            return await self._rendered_by_one(request)
        except WorkerLost:
            return await self._rendered_by_one(request)

    async def _rendered_by_one(self, request: Render) -> Reply:
        worker = await self._take()
        reply = await self._ask(worker, request)
        self._idle.append(worker)
        return reply

    async def close(self) -> None:
        """Ends the workers."""
        while self._idle:
            await self._idle.pop().kill()
        if self.tool_use is not None:
            await self.tool_use.close()

    async def _take(self) -> _Worker:
        """An idle worker, or a new one where none has lived on."""
        while self._idle:
            worker = self._idle.pop()
            if worker.process.poll() is None:
                return worker
            await worker.kill()
        return await self._spawn()

    async def _spawn(self) -> _Worker:
        worker = await _Worker.spawn()
        reply = await self._ask(worker, Load(self.source, dict(self.variables), self.time_limit_s))
        if isinstance(reply, Loaded):
            self.strings = tuple(reply.strings)
            self.takes_tools = "tools" in reply.names
            return worker
        await worker.kill()
        assert isinstance(reply, Failed)
        raise StartupError(reply.message)

    async def _ask(self, worker: _Worker, request: Load | Render) -> Reply:
        """Asks a worker; one that fails, or is left in the middle of an exchange, is ended.

        TemplateFailed for one that has ended itself, WorkerLost for one that was killed. Its own clock comes before
        ours, unless the process gets next to no core.
        """
        try:
            async with asyncio.timeout(WALL_FACTOR * self.time_limit_s):
                return await worker.ask(request)
        except (EOFError, OSError) as error:
            await worker.kill()
            log.error("a chat template worker ended", code=worker.process.returncode, time_limit_s=self.time_limit_s)
            if was_killed(worker.process.returncode):
                raise WorkerLost("The process that renders the chat template was killed; try again.") from error
            how = "took too long" if worker.process.returncode == -OUT_OF_TIME else "ended its process"
            raise TemplateFailed(f"The chat template {how}.", code="template_error") from error
        except BaseException:
            await asyncio.shield(worker.kill())
            raise


def _failure(reply: Failed) -> OutriderError:
    if reply.kind == "refused":
        return InvalidArgument(
            f"The chat template refuses these messages: {reply.message}", field="messages", code="template_error"
        )
    if reply.kind == "too_long":
        return RenderTooLong(
            "The messages are longer than the model's context.", field="messages", code="context_length_exceeded"
        )
    log.error("the chat template broke", reason=reply.message)
    return InvalidArgument("The chat template cannot render these messages.", field="messages", code="template_error")
