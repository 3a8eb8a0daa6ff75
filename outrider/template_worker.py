"""A process that renders one chat template. The template is code from a model folder, so it runs here and not in the
gateway or in what makes training data: sandboxed, with bounded memory, and ended by the kernel when a render takes too
long.

Frames in both directions: 4 bytes of length, then JSON. The file runs alone (isolated.py) and imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import re
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

import jinja2
import markupsafe
import msgspec
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

PACKAGES = (jinja2, markupsafe, msgspec)
TIME_LIMIT_S = 5.0  # of a render's own CPU time, as a rule
WALL_FACTOR = 6  # times as long may go by: a busy machine gives the process a part of a core
OUT_OF_TIME = signal.SIGPROF  # what then ends the process
_CLOCK = signal.ITIMER_PROF  # stands still while the process does: a suspended machine is not the template's doing
MAX_MEMORY_BYTES = 2**29
HEADER_BYTES = 4
_PR_SET_PDEATHSIG = 1
_MAX_MESSAGE_CHARS = 300
_ALWAYS_GIVEN = {"tools": None, "documents": None}  # templates ask whether these are none, not whether they are defined
_ESCAPED_PRIVATE = re.compile(r"\\u(e[0-9a-f]{3}|f[0-8][0-9a-f]{2})")


class Load(msgspec.Struct, tag=True):
    """The first frame: the template, the names it may use, and how long a render may take."""

    source: str
    variables: dict[str, str]
    time_limit_s: float


class Loaded(msgspec.Struct, tag=True):
    """The template compiles. `strings` are the literals in its expressions: what it may look for in messages.

    `names` are the variables that it is given from outside.
    """

    strings: list[str]
    names: list[str]


class Render(msgspec.Struct, tag=True):
    """Asks for a text of at most `max_chars` characters."""

    context: dict[str, Any]
    max_chars: int


class Rendered(msgspec.Struct, tag=True):
    """The text."""

    text: str


class Failed(msgspec.Struct, tag=True):
    """No text: the template refused the messages ("refused"), broke ("broken"), or wrote too much ("too_long")."""

    kind: str
    message: str


Request = Load | Render
Reply = Loaded | Rendered | Failed


class Refused(Exception):
    """The template called raise_exception."""


class TooLong(Exception):
    """The output passed its limit."""


class GenerationBlock(Extension):
    """`{% generation %}`, which marks the assistant's text for training in some templates: as if not there."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Renderer:
    """A compiled template in its sandbox."""

    def __init__(self, load: Load) -> None:
        self._env = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationBlock],
        )
        self._env.filters["tojson"] = to_json
        self._env.globals.update(raise_exception=_refuse, strftime_now=_strftime_now)
        self._template = self._env.from_string(load.source)
        self._variables = {**_ALWAYS_GIVEN, **load.variables}
        tree = self._env.parse(load.source)
        self.names = sorted(meta.find_undeclared_variables(tree))
        self.strings = sorted({node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)})

    def render(self, context: dict[str, Any], max_chars: int) -> str:
        """The text; TooLong as soon as it passes the limit."""
        return "".join(_up_to(self._template.generate({**self._variables, **context}), max_chars))


def _up_to(pieces: Iterator[str], max_chars: int) -> Iterator[str]:
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > max_chars:
            raise TooLong
        yield piece


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` that chat templates expect: no HTML escapes. Private-use characters (our stand-ins) stay."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return _ESCAPED_PRIVATE.sub(lambda match: chr(int(match[1], 16)), text) if ensure_ascii else text


def _refuse(message: str) -> None:
    raise Refused(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _answer(renderer: Renderer, request: Render) -> Reply:
    try:
        return Rendered(renderer.render(request.context, request.max_chars))
    except Refused as error:
        return Failed("refused", str(error)[:_MAX_MESSAGE_CHARS])
    except TooLong:
        return Failed("too_long", "")
    except Exception as error:  # whatever a template can raise, MemoryError and RecursionError too
        return _broken(error)


def _broken(error: Exception) -> Failed:
    return Failed("broken", f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARS])


def _serve(source: BinaryIO, sink: BinaryIO) -> None:
    load = _read(source, Load)
    if load is None:
        return
    signal.setitimer(_CLOCK, load.time_limit_s)
    try:
        renderer = Renderer(load)
    except Exception as error:
        _write(sink, _broken(error))
        return
    signal.setitimer(_CLOCK, 0)
    _write(sink, Loaded(renderer.strings, renderer.names))
    while (request := _read(source, Render)) is not None:
        signal.setitimer(_CLOCK, load.time_limit_s)
        reply = _answer(renderer, request)
        signal.setitimer(_CLOCK, 0)
        _write(sink, reply)


def _read(source: BinaryIO, kind: Any) -> Any:
    header = source.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    return msgspec.json.decode(source.read(body_size(header)), type=kind)


def _write(sink: BinaryIO, reply: Reply) -> None:
    try:
        body = frame(reply)
    except Exception as error:  # half of a surrogate pair, say, of the template's own
        body = frame(_broken(error))
    sink.write(body)
    sink.flush()


def frame(message: Request | Reply) -> bytes:
    """A message as its bytes on the pipe."""
    body = msgspec.json.encode(message)  # whose whole numbers may have any size, as a schema's do
    return struct.pack(">I", len(body)) + body


def body_size(header: bytes) -> int:
    """How many bytes follow a frame's first HEADER_BYTES."""
    (size,) = struct.unpack(">I", header)
    return size


def reply_of(body: bytes) -> Reply:
    """The worker's message of a frame's body."""
    return msgspec.json.decode(body, type=Reply)


def was_killed(status: int | None) -> bool:
    """Whether a worker that ended with this exit status was ended by others, and may be begun again."""
    return status in (0, -signal.SIGKILL)


def main() -> None:
    """Renders until stdin closes. OUT_OF_TIME keeps its default action: it ends the process, whatever the code does.

    Whoever stops a service may tell all its processes: we go with the one that we render for.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(OUT_OF_TIME, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ConnectionError):  # whom we render for was killed, with an answer of ours unread
        _serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
