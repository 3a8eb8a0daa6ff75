"""Values of a request as an error message shows them: whole where short, never a text that somebody wrote."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from msgspec import inspect

from outrider.errors import InvalidArgument, NotFound

MAX_CHARS = 48
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+|\.{3})\]")
_WORD = re.compile(rf"[\w-]{{1,{MAX_CHARS}}}")
_KINDS = {"null": type(None), "bool": bool, "int": int, "float": float, "str": str, "array": list, "object": dict}


def shown(value: object) -> str:
    """A number, a name, or what kind of thing it is and how long; JSON's words, at most MAX_CHARS of them.

    What an array or an object holds is not gone into: it may nest deeper than the stack.
    """
    if isinstance(value, list | dict):
        return f"{'an array' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = json.dumps(value)
    if len(text) <= MAX_CHARS:
        return text
    return f"a string of {len(value)}" if isinstance(value, str) else text[:MAX_CHARS] + "..."


def found_at(body: Any, path: str) -> str:
    """The value at a path as msgspec writes it, `messages[0].role`, as `shown` has it; empty where it is not told.

    `[...]` is the value of some key of an object: it can be told when there is one key.
    """
    try:
        return shown(_value_at(body, path))
    except (KeyError, IndexError, TypeError, ValueError):
        return ""


def with_key(body: Any, path: str, kind: str) -> str:
    """A path whose `[...]` at the end is the key of the object's first value of a type, in msgspec's word for it.

    The same where there is none, or the key is no plain word.
    """
    try:
        values = _value_at(body, path.removesuffix("[...]"))
        key = next(key for key, value in values.items() if type(value) is _KINDS[kind])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, StopIteration):
        return path
    return path.removesuffix("[...]") + f"[{key}]" if _WORD.fullmatch(key) else path


def _value_at(body: Any, path: str) -> Any:
    for match in _STEP.finditer(path):
        if match[2] == "...":
            (body,) = body.values()
        else:
            body = body[match[1] if match[2] is None else int(match[2])]
    return body


@functools.cache
def _described(kind: type) -> Any:
    return inspect.type_info(kind)


def words_at(kind: type, path: str) -> tuple[str, ...]:
    """The words that a field takes, at a path as `found_at` reads it; empty for one that takes others too."""
    found: list[Any] = [_described(kind)]
    for match in _STEP.finditer(path):
        found = [inner for outer in _without_unions(found) for inner in _inside(outer, match[1])]
    words = [one for one in _without_unions(found) if isinstance(one, inspect.LiteralType)]
    return tuple(str(value) for one in words for value in one.values)


def _without_unions(kinds: list[Any]) -> list[Any]:
    return [one for kind in kinds for one in (kind.types if isinstance(kind, inspect.UnionType) else (kind,))]


def _inside(kind: Any, name: str | None) -> list[Any]:
    """What a field of an object is, or with no name the items of an array or the values of an object."""
    match kind:
        case inspect.StructType() if name is not None:
            return [field.type for field in kind.fields if field.encode_name == name]
        case inspect.ListType() if name is None:
            return [kind.item_type]
        case inspect.DictType():
            return [kind.value_type]
    return []


def no_such_model(name: str, there: str) -> NotFound:
    """The error for a model that is not served, where `there` is."""
    named = shown(name) if len(json.dumps(name)) <= MAX_CHARS else f"with a name of {len(name)} characters"
    return NotFound(f"The model {named} does not exist; {there} does.", field="model", code="model_not_found")


def no_such_token(token: int, vocab_size: int, field: str) -> InvalidArgument:
    """The error for an id outside of the vocabulary."""
    return InvalidArgument(f"Token ids are from 0 to {vocab_size - 1}, not {token}.", field=field, code="invalid_value")


def missing(field: str) -> InvalidArgument:
    """The error for a field that has to be there."""
    return InvalidArgument(f"Missing required parameter: '{field}'.", field=field, code="missing_required_parameter")


def not_text(kind: str, field: str) -> InvalidArgument:
    """The error for a part of a message that is an image, a sound or a file."""
    return InvalidArgument(
        f"This server reads only text parts, not {shown(kind)}.", field=field, code="unsupported_content"
    )
