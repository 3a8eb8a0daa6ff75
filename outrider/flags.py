"""Settings as frozen dataclasses that refuse nonsense, and the command-line flags made from them.

A dataclass field `max_running_requests` is the flag `--max-running-requests`; its group, help and choices stand in the
field's metadata.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import math
import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from outrider.errors import StartupError
from outrider.flag_advice import meant
from outrider.wire import INT31_MAX

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

ArgsT = TypeVar("ArgsT", bound="Args")

MAX_THREADS = 1024  # many more end a process
_MOST_BY_UNIT = {"_bytes": 2**63 - 1, "_s": 1_000_000, "_ms": 1_000_000_000}  # of times, what all clocks can wait for


def arg(
    default: Any, group: str, help: str, *, aliases: tuple[str, ...] = (), read: Callable[[str], Any] | None = None
) -> Any:
    """A field that is a flag. A bool is a switch; a tuple is a flag that may be repeated.

    read: makes the value of the command line's word; left out, the field's type does.
    """
    return field(default=default, metadata={"group": group, "help": help, "aliases": aliases, "read": read})


def bound_host(host: str) -> str:
    """A host as it is bound to: IPv6 ones without the brackets that stand before a port; an empty one is any."""
    return host[1:-1] if host[:1] + host[-1:] == "[]" else host or "0.0.0.0"


@dataclass(frozen=True, kw_only=True)
class Args:
    """Settings of one process."""

    command: ClassVar[str]
    summary: ClassVar[str]

    def check(self) -> None:
        """Raises StartupError naming the flag and the fix. Those of settings that are put together call super's."""

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            _check_value(flag_of(spec), spec.name, getattr(self, spec.name))
        self.check()

    @classmethod
    def parse(cls, argv: list[str]) -> Self:
        """The settings of command-line words; exits with 2 and a usage line when they are wrong."""
        parser = parser_for(cls)
        namespace, unknown = parser.parse_known_args(argv)
        if unknown:
            flags = [flag for action in parser._actions for flag in action.option_strings]
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{meant(unknown, flags)}")
        return cls(**{f.name: getattr(namespace, f.name) for f in dataclasses.fields(cls)})

    def to_argv(self) -> list[str]:
        """The command-line words that give these settings; defaults are left out."""
        words: list[str] = []
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if value == spec.default:
                continue
            for item in value if isinstance(value, tuple) else (value,):
                words += [flag_of(spec)] if item is True else [f"{flag_of(spec)}={item}"]
        return words

    def as_flags(self) -> dict[str, str]:
        """Every setting by flag, for server info."""
        return {flag_of(spec).lstrip("-"): str(getattr(self, spec.name)) for spec in dataclasses.fields(self)}

    @classmethod
    def from_flags(cls, flags: Mapping[str, str]) -> dict[str, Any]:
        """What `as_flags` gave, by field name and typed; flags of another version's stay text."""
        hints = get_type_hints(cls)
        known = {flag_of(spec).lstrip("-"): (spec.name, hints[spec.name]) for spec in dataclasses.fields(cls)}
        found: dict[str, Any] = {}
        for flag, text in flags.items():
            name, hint = known.get(flag, (flag.replace("-", "_"), str))
            found[name] = _typed(text, hint)
        return found


class _Parser(argparse.ArgumentParser):
    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """OSError where help cannot be written, of which some releases of Python say nothing."""
        target = sys.stderr if file is None else file
        try:
            target.write(message)
        except OSError:
            if target is not sys.stderr:  # else nobody hears what was wrong, and the exit code says it
                raise


def parser_for(cls: type[Args]) -> argparse.ArgumentParser:
    """The argument parser of a settings class, grouped as its fields say."""
    parser = _Parser(
        prog=f"outrider {cls.command}", usage="%(prog)s [FLAGS]", description=cls.summary, allow_abbrev=False
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    hints = get_type_hints(cls)
    for spec in dataclasses.fields(cls):
        name = spec.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        kind = _kind(hints[spec.name])
        if spec.metadata["read"] is not None:
            kind["type"] = spec.metadata["read"]
        groups[name].add_argument(
            flag_of(spec), *spec.metadata["aliases"], dest=spec.name, default=spec.default, help=_help(spec), **kind
        )
    return parser


def _help(spec: dataclasses.Field[Any]) -> str:
    text = spec.metadata["help"].replace("%", "%%")
    if spec.default in (None, False, ()):
        return text
    if spec.default == "":
        return f"{text} (required)"
    default = " ".join(spec.default) if isinstance(spec.default, tuple) else spec.default
    return f"{text} (default: {default})"


def flag_of(spec: dataclasses.Field[Any]) -> str:
    """The command-line flag of a field."""
    return flag_named(spec.name)


def flag_named(name: str) -> str:
    """The command-line flag of a field of that name."""
    return "--" + name.replace("_", "-")


def _check_value(flag: str, name: str, value: Any) -> None:
    """StartupError for what no setting of its type may be."""
    for text in value if isinstance(value, tuple) else (value,):
        if isinstance(text, str) and not is_text(text):
            raise StartupError(f"{flag} is not valid UTF-8")
    if isinstance(value, float) and not math.isfinite(value):
        raise StartupError(f"{flag} is {value}; it must be a finite number")
    most = next((most for unit, most in _MOST_BY_UNIT.items() if name.endswith(unit)), None)
    if most is None and isinstance(value, int):
        most = INT31_MAX  # what arrays and messages hold
    if most is not None and isinstance(value, int | float) and abs(value) > most:
        raise StartupError(f"{flag} is {value}; it must be at most {most}")


def _typed(text: str, hint: Any) -> Any:
    """A field's value from its str()."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if text == "None" and type(None) in options:
        return None
    if str in options or any(text in get_args(option) for option in options if get_origin(option) is Literal):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _kind(hint: Any) -> dict[str, Any]:
    """argparse's keywords for a field's type."""
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = [option for option in get_args(hint) if option is not type(None)]
    if get_origin(hint) is tuple:
        return {"action": _Repeat, "type": get_args(hint)[0], "metavar": _metavar(get_args(hint)[0])}
    if get_origin(hint) is Literal:
        return {"choices": list(get_args(hint)), "type": type(get_args(hint)[0])}
    return {"type": hint, "metavar": _metavar(hint)}


def _metavar(kind: type) -> str:
    return {int: "N", float: "X", str: "TEXT", Path: "PATH"}[kind]


class _Repeat(argparse.Action):
    """Collects a repeated flag in a tuple; the default goes when the flag is given."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        given = getattr(namespace, f"_{self.dest}_given", ())
        setattr(namespace, f"_{self.dest}_given", (*given, values))
        setattr(namespace, self.dest, (*given, values))


def at_least(settings: Args, minimum: int, *names: str) -> None:
    """StartupError for the first of the named settings that is below `minimum`."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < minimum:
            raise StartupError(f"{flag_named(name)} is {value}; it must be at least {minimum}")


def above_zero(settings: Args, *names: str) -> None:
    """StartupError for the first of the named settings that is not above 0."""
    for name in names:
        if not (value := getattr(settings, name)) > 0:
            raise StartupError(f"{flag_named(name)} is {value}; it must be above 0")


def at_most(settings: Args, maximum: int, *names: str) -> None:
    """StartupError for the first of the named settings that is above `maximum`."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value > maximum:
            raise StartupError(f"{flag_named(name)} is {value}; it must be at most {maximum}")


def check_device(name: str) -> None:
    """StartupError for a --device that no machine has; whether this one has it, engine/devices.py finds."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", name):
        raise StartupError(f"--device is {name!r}; it must be auto, cpu, cuda or cuda:N")


def check_url(flag: str, url: str, example: str) -> None:
    """StartupError unless a URL is one that HTTP can be spoken to."""
    if not is_url(url):
        raise StartupError(f"{flag} is {url!r}; it must be a URL, such as {example}")


def is_url(text: str) -> bool:
    """Whether text names a server, to be asked by HTTP."""
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # a port that is no number, or above 65535; brackets that do not close
        return False


def check_key(flag: str, key: str) -> None:
    """StartupError unless a header can hold the key, which is not told."""
    if not (key and key.isascii() and key.isprintable() and key == key.strip()):
        raise StartupError(f"{flag} must be printable ASCII without space around it: no HTTP header may hold others")


def is_text(words: str) -> bool:
    """Whether words came as UTF-8: Python keeps other bytes of a command line or a terminal as lone surrogates."""
    return not any("\ud800" <= letter <= "\udfff" for letter in words)
