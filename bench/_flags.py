"""A benchmark's command line: its parser, and kinds of values."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.flags import MAX_THREADS, flag_named, is_text
from outrider.tree_limits import most_nodes

SERVE_EPILOG = "Other flags, and all after --, go to `outrider serve`."


def parser_of(name: str, doc: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """The parser of `outrider bench NAME`, described by the first line of its module's docstring."""
    return argparse.ArgumentParser(
        prog=f"outrider bench {name}", description=(doc or "").partition("\n")[0], epilog=epilog
    )


def own_and_other(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The benchmark's own flags, and those of the command that it starts: all that it does not know, or after `--`."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    args, other = parser.parse_known_args(words[:cut])
    return args, other + words[cut + 1 :]


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def positive(text: str) -> int:
    """A whole number from 1."""
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def thread_count(text: str) -> int:
    """CPU threads that a process can have."""
    value = positive(text)
    if value > MAX_THREADS:
        raise argparse.ArgumentTypeError(f"{value} is not at most {MAX_THREADS}")
    return value


def natural(text: str) -> int:
    """A whole number from 0."""
    value = _whole(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value


def above_zero(text: str) -> float:
    """A finite number above 0."""
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def not_below_zero(text: str) -> float:
    """A finite number from 0."""
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0")
    return value


def tokens_of_trees(steps: int, branches: int) -> tuple[int, int]:
    """Fewest and most draft tokens, the root counted, of trees of so many steps and branches."""
    most = most_nodes(steps, branches) + 1
    return (most if branches == 1 else 2), most


def shapes(text: str) -> list[tuple[int, int, int]]:
    """Steps, branches and draft tokens of trees, joined by slashes. A chain has a token for each step, and its root."""
    found: list[tuple[int, int, int]] = []
    for part in text.split("/"):
        numbers = counts(part)
        if len(numbers) != 3:
            raise argparse.ArgumentTypeError(f"{part} is not STEPS,BRANCHES,TOKENS")
        steps, branches, tokens = numbers
        least, most = tokens_of_trees(steps, branches)
        if branches == 1 and tokens != most:
            raise argparse.ArgumentTypeError(f"{part} is a chain, of which {steps} steps make {most} tokens")
        if not least <= tokens <= most:
            raise argparse.ArgumentTypeError(f"{part} has {tokens} tokens; such trees have 2 to {most}")
        found.append((steps, branches, tokens))
    return found


def refuse_given(parser: argparse.ArgumentParser, args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Ends with a word about the first of these flags, without defaults, that was given."""
    for name in names:
        if getattr(args, name) is not None:
            parser.error(f"{flag_named(name)} {why}")


def output_file(text: str) -> Path:
    """A file that can be written, which is tried: it is written when all has been measured."""
    path = Path(text)
    try:
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{text} is a folder")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"the folder {path.parent} does not exist")
        if path.exists() and not path.is_file():  # to open a pipe may wait for its reader
            return path
        target = Path(os.path.realpath(path))
        is_new = not target.exists()
        target.open("ab").close()
        if is_new:
            target.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror or error}") from error
    return path


def output_folder(text: str) -> Path:
    """A folder, made where it is not there."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be a folder: {error.strerror or error}") from error
    return path


def counts(text: str) -> list[int]:
    """Whole numbers from 1, joined by commas."""
    return [positive(part) for part in text.split(",")]


def rates(text: str) -> list[float]:
    """Numbers above 0, joined by commas."""
    values = [_number(part) for part in text.split(",")]
    if not all(0 < value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"{text} holds a rate that is not above 0")
    return values


def names(text: str) -> list[str]:
    """Words joined by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def read_json(text: str) -> Any:
    """A JSON value that can be sent on. ValueError for none, and for one with NaN, Infinity or a lone surrogate."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("too many levels") from error
    return value


def utf8(text: str) -> str:
    """Words that JSON and a terminal can hold."""
    if not is_text(text):
        raise argparse.ArgumentTypeError("not UTF-8 text")
    return text


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = read_json(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object of finite numbers and UTF-8 text")
    return value


_OWN_FIELDS = (
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "ignore_eos", "stream",
    "stream_options", "n", "best_of",
)  # fmt: skip


def request_fields(text: str) -> dict[str, Any]:
    """A JSON object of a request's fields, but for those that the figures count on."""
    fields = json_object(text)
    for name in _OWN_FIELDS:
        if name in fields:
            raise argparse.ArgumentTypeError(f"{name} is the benchmark's own: a flag says it, or the figures do")
    return fields


def setting(args: argparse.Namespace) -> dict[str, Any]:
    """What a benchmark was asked for, as JSON; where the figures go is no part of it."""
    return {name: _told(value) for name, value in vars(args).items() if name not in ("output", "plot")}


def _told(value: object) -> Any:
    if isinstance(value, list | tuple):
        return [_told(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value) if isinstance(value, Path) else getattr(value, "name", str(value))
