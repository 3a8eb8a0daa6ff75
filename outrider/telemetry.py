"""Structured logs on stderr: readable on a terminal, JSON elsewhere. Prompts and outputs are never logged."""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TextIO, cast

import structlog

from outrider import env
from outrider.lossy import lossy
from outrider.terminal import shown_line, shown_text

_SERVICES = {"verify_service": "verify", "draft_service": "draft", "gateway": "gateway"}  # by package


def configure_logging(service: str) -> None:
    """Sets up logging for a process; every line names the service: its package's, else this one."""
    level = getattr(logging, env.log_level().upper())
    renderers: list[structlog.types.Processor] = (
        [_show_controls, structlog.dev.ConsoleRenderer()]
        if sys.stderr.isatty()
        else [structlog.processors.JSONRenderer()]
    )
    told = lossy(sys.stderr)
    told.service = service
    stderr = cast(TextIO, told)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            partial(_name_service, service),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        # A line is one write: processes that share a pipe do not get into each other's lines.
        logger_factory=structlog.WriteLoggerFactory(stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=max(level, logging.WARNING), stream=stderr)
    shown = _ShownFormatter(logging.BASIC_FORMAT) if sys.stderr.isatty() else _json_formatter(service)
    logging.root.handlers[0].setFormatter(shown)


def _json_formatter(service: str) -> logging.Formatter:
    """The formatter of what libraries log, as JSON."""
    return structlog.stdlib.ProcessorFormatter(
        processor=structlog.processors.JSONRenderer(),
        foreign_pre_chain=[
            _name_module, partial(_name_service, service), structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"), structlog.processors.format_exc_info,
        ],
    )  # fmt: skip


def _name_module(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Names the module of a library's line, as our own lines do."""
    event["module"] = event["_record"].name
    return event


def _show_controls(
    logger: object, method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:  # fmt: skip
    """Shows control characters: what strangers send is logged, and a terminal would obey it; what is no text is shown
    by its repr anyway."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = shown_text(value) if key == "exception" else shown_line(value)
    return event


class _ShownFormatter(logging.Formatter):
    """Shows control characters in what libraries log."""

    def format(self, record: logging.LogRecord) -> str:
        return shown_text(super().format(record))


def _name_service(
    usual: str, logger: object, method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:  # fmt: skip
    """Names the service by the module's package: a thread has no context of whoever started it, and in one process
    verify is called in that of its drafter."""
    package = str(event.get("module", "")).partition(".")[0]
    event["service"] = _SERVICES.get(package) or event.get("service") or usual
    return event


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """The logger of a module."""
    return cast(structlog.typing.FilteringBoundLogger, structlog.get_logger(module=name))


def announce(line: str) -> None:
    """One line for the person at the terminal, on stdout; a service does not end where it cannot be written."""
    if sys.stdout is None:
        return
    if lossy(sys.stdout).is_direct:
        lossy(sys.stdout).write(line + "\n")
        return
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@dataclass(slots=True)
class Throttle:
    """Lets so many log lines a minute through; a flood of strangers fills no disk."""

    lines_a_minute: int = 20
    suppressed: int = 0
    _window: float = field(default_factory=time.monotonic)
    _said: int = 0

    def allows(self) -> bool:
        """Whether one more line may be written now."""
        now = time.monotonic()
        if now - self._window >= 60:
            self._window, self._said = now, 0
        self._said += 1
        self.suppressed += self._said > self.lines_a_minute
        return self._said <= self.lines_a_minute
