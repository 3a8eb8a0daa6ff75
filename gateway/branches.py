"""What tells the branches of a `oneOf` apart: types, the values that they name, bounds of numbers, tags of objects."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gateway.json_schema import pointed_at

_MAX_HOPS = 8
_MAX_TAGS = 16
_ANYTHING: Mapping[str, Any] = {}
_TYPES = frozenset(("object", "array", "string", "number", "boolean", "null"))

Value = tuple[str, Any]
"""A type of JSON's, for which 1 is not true, and a value of it that is no array and no object."""

End = tuple[float, int]
"""Of an interval: a number, and 1 or -1 for one that begins above or ends below it."""


@dataclass(slots=True)
class _Branch:
    """What a value must be to match a schema: of one of these types and, where there are `values`, one of these unless
    it is an array or an object; a number, within these ends; an object, with one of these values for each tag."""

    types: frozenset[str]
    values: frozenset[Value] | None
    ends: tuple[End, End]
    tags: dict[str, frozenset[Value]]

    def of_type(self, kind: str) -> frozenset[Value] | None:
        """The values of one type that it may be, where they are known."""
        return None if self.values is None else frozenset(value for value in self.values if value[0] == kind)


class Branches:
    """The branches of a document's `oneOf`s, references followed."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._seen: dict[int, _Branch] = {}  # by the schema's identity: many may refer to one that is large

    def are_apart(self, branches: Sequence[Any]) -> bool:
        """Whether it can be told that no value matches two."""
        found = [self._branch(self._resolved(branch)) for branch in branches]
        return all(_is_apart(kind, [branch for branch in found if kind in branch.types]) for kind in _TYPES)

    def _branch(self, schema: Mapping[str, Any]) -> _Branch:
        if id(schema) not in self._seen:
            values = _values(schema)
            self._seen[id(schema)] = _Branch(_types(schema), values, _ends(schema, values), _tags(schema))
        return self._seen[id(schema)]

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        """What a schema refers to, or itself; one that tells nothing where that is not known."""
        for _ in range(_MAX_HOPS):
            if not isinstance(schema, Mapping):
                break
            if "$ref" not in schema:
                return schema
            reference = schema["$ref"]
            schema = pointed_at(self._root, reference) if isinstance(reference, str) else None
        return _ANYTHING


def _is_apart(kind: str, branches: Sequence[_Branch]) -> bool:
    """Whether no value of a type, which all of these may be, matches two."""
    if len(branches) < 2:
        return True
    if kind == "array" or len({id(branch) for branch in branches}) < len(branches):
        return False
    if kind == "object":
        shared = set(branches[0].tags).intersection(*(branch.tags for branch in branches[1:]))
        return any(_are_distinct([branch.tags[name] for branch in branches]) for name in shared)
    values = [some for branch in branches if (some := branch.of_type(kind)) is not None]
    if len(values) == len(branches) and _are_distinct(values):
        return True
    ends = sorted(branch.ends for branch in branches)
    return kind == "number" and all(one[1] < other[0] for one, other in pairwise(ends))


def _are_distinct(groups: Sequence[frozenset[Value]]) -> bool:
    """Whether no group has a value that another has."""
    return len(frozenset[Value]().union(*groups)) == sum(map(len, groups))


# ---- What a schema says


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    given = schema.get("type")
    types = given if isinstance(given, list) else [given]
    named = frozenset("number" if kind == "integer" else kind for kind in types if isinstance(kind, str))
    allowed = named if named and named <= _TYPES else _TYPES
    given = listed(schema)
    return allowed if given is None else allowed & {type_of(value) for value in given}


def type_of(value: object) -> str:
    """JSON's name for a value's type; of an integer, "number"."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
    return "array" if isinstance(value, list) else "object"


def listed(schema: Mapping[str, Any]) -> list[Any] | None:
    """What `const` or `enum` lets a value be."""
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    return given if isinstance(given, list) else None


def _values(schema: Mapping[str, Any]) -> frozenset[Value] | None:
    given = listed(schema)
    if given is None:
        return None
    return frozenset((type_of(value), value) for value in given if not isinstance(value, list | Mapping))


def _ends(schema: Mapping[str, Any], values: frozenset[Value] | None) -> tuple[End, End]:
    """The least and the greatest number that a schema allows."""
    numbers = [value for kind, value in values or () if kind == "number"]
    if numbers:
        return (min(numbers), 0), (max(numbers), 0)
    least = [(_bound(schema, "minimum", -math.inf), 0), (_bound(schema, "exclusiveMinimum", -math.inf), 1)]
    most = [(_bound(schema, "maximum", math.inf), 0), (_bound(schema, "exclusiveMaximum", math.inf), -1)]
    return max(least), min(most)


def _bound(schema: Mapping[str, Any], key: str, otherwise: float) -> float:
    bound = schema.get(key)
    return bound if isinstance(bound, int | float) and not isinstance(bound, bool) else otherwise


def _tags(schema: Mapping[str, Any]) -> dict[str, frozenset[Value]]:
    """The values that a property may be, for the first of those that must be there and are one of a few scalars."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return {}
    found: dict[str, frozenset[Value]] = {}
    needed = {name for name in required if isinstance(name, str)}
    for name, item in properties.items():
        if name in needed and isinstance(item, Mapping) and len(found) < _MAX_TAGS:
            values = _values(item)
            if values is not None and len(values) <= _MAX_TAGS and not _types(item) & {"array", "object"}:
                found[name] = values
    return found
