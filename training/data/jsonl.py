"""Files of prompts that users bring, a JSON value a line. What is wrong is told with file, line and reason."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.errors import StartupError, reason_of


class WrongLine(Exception):
    """A value that is not what was expected; the message says why, in words."""


def read_values(path: Path) -> Iterator[tuple[int, Any]]:
    """Number and value of every line that is not empty. StartupError when the file, or a line of it, cannot be read."""
    try:
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise StartupError(f"prompts cannot be read from {path}: {reason_of(error)}") from error
    # Not splitlines: JSON's strings may hold U+2028 and others that it splits at.
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line.decode())
        except RecursionError as error:
            raise wrong(path, number, "its brackets are nested too deeply") from error
        except UnicodeDecodeError as error:
            raise wrong(path, number, f"it is not UTF-8: {error.reason} at byte {error.start + 1}") from error
        except json.JSONDecodeError as error:
            raise wrong(path, number, f"it is not JSON: {error.msg} at column {error.colno}") from error
        except ValueError as error:
            raise wrong(path, number, f"it is not JSON: {reason_of(error)}") from error


def wrong(path: Path, number: int, reason: object) -> StartupError:
    """The error for a line."""
    return StartupError(f"{path}, line {number}: {reason}")


def said_as(value: Any) -> str:
    """A value's kind in JSON, for messages."""
    if isinstance(value, bool):
        return "true or false"
    kinds: dict[type, str] = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
    return "null" if value is None else kinds[type(value)]
