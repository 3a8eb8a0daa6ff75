"""JSON schemas as verify's grammars can say them.

A strict one is put in other words where these mean the same, and what is left that no grammar can say is refused. Of
another, a promise that was not asked for, it is left out: what can be said is held to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.json_schema import moved, pointed_at, with_inner
from outrider.multiples import MOST_REMAINDERS, remainders
from outrider.wire import MAX_GRAMMAR_BYTES

# What llguidance refuses outside its lenient mode, which goes for a grammar as a whole and so for strict tools as well.
_UNKNOWN = frozenset((
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties",
    "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor",
))  # fmt: skip
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
# Of a pattern, so that what a backslash or a class makes an ordinary character is not taken for anything else.
_PATTERN_PARTS = re.compile(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*\]?|\(\?(?:<?[=!]|>|P=)", re.DOTALL)
_UNSAYABLE_ESCAPES = frozenset("\\" + char for char in "bB123456789kcZ")  # back, around, or no known one
_LEAST, _MOST = -(2**63), 2**63 - 1  # bounds of numbers are between these, exclusive,
_FAR = 10**18 - 1  # and leave values of fewer digits than this
_MAX_HOPS = 8
_MAX_TAGS = 16
_ANYTHING: Mapping[str, Any] = {}
_TYPES = frozenset(("object", "array", "string", "number", "boolean", "null"))


def sayable(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """The schema, or one that allows all that it does and more where it is not strict."""
    if len(msgspec.json.encode(schema)) > MAX_GRAMMAR_BYTES:  # it will be refused, or holds nothing to it
        return dict(schema)
    own = moved(schema, "#")
    return _exact(own, _Document(own)) if strict else _relaxed(own)


# ---- What is not strict


def _relaxed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_relaxed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    known = {key: item for key, item in schema.items() if _is_known(key, item, schema)}
    made = with_inner(known, _relaxed)
    if "oneOf" in made:  # one at least is what can be said of it
        _say_any_of(made)
    if isinstance(patterns := made.get("patternProperties"), dict):
        told = {pattern: item for pattern, item in patterns.items() if not _looks_around(pattern)}
        if len(told) < len(patterns):  # what they allow goes for other properties now
            made["patternProperties"] = told
            made.pop("additionalProperties", None)
    return made


def _is_known(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    match key:
        case "format":
            return isinstance(value, str) and value in _FORMATS
        case "pattern":
            return not (isinstance(value, str) and _looks_around(value))
        case "minimum" | "exclusiveMinimum" | "maximum" | "exclusiveMaximum":
            return not isinstance(value, int | float) or _is_near(key, value, schema)
        case "multipleOf":
            return remainders(str(value)) <= MOST_REMAINDERS
        case "minProperties" | "maxProperties":
            return not _has_optional(schema)
    return key not in _UNKNOWN


def _looks_around(pattern: str) -> bool:
    """Or back, or at anything else that a pattern is more than regular with."""
    return any(part[:2] == "(?" or part in _UNSAYABLE_ESCAPES for part in _PATTERN_PARTS.findall(pattern))


def _is_near(key: str, bound: float, schema: Mapping[str, Any]) -> bool:
    if key.endswith("inimum"):
        return _LEAST < bound < _FAR
    return bound > -_FAR and (bound < _MOST or schema.get("type") in ("integer", ["integer", "null"]))


def _has_optional(schema: Mapping[str, Any]) -> bool:
    """Whether a property of an object is surely none of those that it must have."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return False
    return not schema.keys() & {"allOf", "anyOf", "oneOf", "$ref"} and any(name not in required for name in properties)


def _say_any_of(made: dict[str, Any]) -> None:
    either = made.pop("oneOf")
    if "anyOf" not in made:
        made["anyOf"] = either
    else:
        more = made.get("allOf", [])
        made["allOf"] = [*(more if isinstance(more, list) else []), {"anyOf": either}]


# ---- What is strict


def _exact(schema: Any, document: _Document) -> Any:
    if isinstance(schema, list):
        return [_exact(item, document) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = with_inner(schema, lambda item: _exact(item, document))
    if made.get("propertyNames") in (True, {}, {"type": "string"}):  # as all names are
        del made["propertyNames"]
    branches = schema.get("oneOf")
    if isinstance(branches, list) and any(map(_is_elsewhere, branches)) and document.tells_apart(branches):
        _say_any_of(made)
    return made


def _is_elsewhere(branch: Any) -> bool:
    """Whether llguidance does not look at what tells a branch from others."""
    return isinstance(branch, Mapping) and "$ref" in branch


@dataclass(slots=True)
class _Branch:
    """What a value must be to match a schema: of one of these types; an object, with one of these strings for each."""

    types: frozenset[str]
    tags: dict[str, frozenset[str]]


class _Document:
    """A schema as what its references lead into."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._seen: dict[int, _Branch] = {}  # by the schema's identity: many may refer to one that is large

    def tells_apart(self, branches: Sequence[Any]) -> bool:
        """Whether no value can match two: by their types, and objects by what one property of each has to be."""
        found = [self._branch(self._resolved(branch)) for branch in branches]
        others = [kind for branch in found for kind in branch.types if kind != "object"]
        objects = [branch.tags for branch in found if "object" in branch.types]
        if len(set(others)) < len(others) or len({id(tags) for tags in objects}) < len(objects):
            return False
        shared = set(objects[0]).intersection(*objects[1:]) if objects else set[str]()
        return len(objects) < 2 or any(_are_distinct([tags[name] for tags in objects]) for name in shared)

    def _branch(self, schema: Mapping[str, Any]) -> _Branch:
        if id(schema) not in self._seen:
            self._seen[id(schema)] = _Branch(_types(schema), _tags(schema))
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


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    given = schema.get("type")
    types = given if isinstance(given, list) else [given]
    named = frozenset("number" if kind == "integer" else kind for kind in types if isinstance(kind, str))
    return named if named and named <= _TYPES else _TYPES


def _tags(schema: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """The strings that a property may be, for the first of those that must be there and are one of a few strings."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return {}
    found: dict[str, frozenset[str]] = {}
    needed = {name for name in required if isinstance(name, str)}
    for name, item in properties.items():
        if name in needed and isinstance(item, Mapping) and len(found) < _MAX_TAGS:
            values = [item["const"]] if "const" in item else item.get("enum")
            if isinstance(values, list) and len(values) <= _MAX_TAGS and all(isinstance(one, str) for one in values):
                found[name] = frozenset(values)
    return found


def _are_distinct(groups: Sequence[frozenset[str]]) -> bool:
    """Whether none has what another has."""
    return len(frozenset[str]().union(*groups)) == sum(map(len, groups))
