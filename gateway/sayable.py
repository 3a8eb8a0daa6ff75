"""JSON schemas as verify's grammars can say them.

A strict one is put in other words where these mean the same, and what is left that no grammar can say is refused. Of
another, a promise that was not asked for, it is left out: what can be said is held to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

import msgspec

from gateway.branches import Branches, listed, type_of
from gateway.error_values import shown
from gateway.json_schema import check_depth, closed, moved, schemas_in, with_inner
from gateway.pattern_starts import never_meet
from gateway.patterns import in_rust, is_regular
from outrider.errors import InvalidArgument
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
# Those that llguidance has; of another it would say that it cannot be fetched.
_DIALECT = re.compile(
    r"(?:http://json-schema\.org/draft-0[467]|https://json-schema\.org/draft/20(?:19-09|20-12))/schema#?"
)
_COUNTS = frozenset(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"))
_LEAST, _MOST = -(2**63), 2**63 - 1  # bounds of numbers are between these, exclusive,
_FAR = 10**18 - 1  # and leave values of fewer digits than this
_WHOLE = 2**53  # a double has all integers below this
_PLACE_CHARS = 200


def check_schema(schema: Mapping[str, Any] | None, field: str, *, strict: bool) -> None:
    """InvalidArgument for a schema that is nested too deeply; for a strict one with numbers that would be rounded."""
    check_depth(schema, field)
    if not strict or schema is None:
        return
    for steps, inner in schemas_in(schema):
        for key, value in inner.items():
            for number in _rounded(key, value, inner):
                where = "".join((*steps, f".{key}"))[1:][-_PLACE_CHARS:]
                raise InvalidArgument(
                    f"A grammar's numbers are doubles; it cannot hold strict output to {shown(number)} in '{where}'.",
                    field=field, code="invalid_json_schema",
                )  # fmt: skip


def sayable(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """The schema with its objects `closed`, or one that allows all that this does and more where it is not strict."""
    if len(msgspec.json.encode(schema)) > MAX_GRAMMAR_BYTES:  # it will be refused, or holds nothing to it
        return dict(schema)
    own = _respelled(moved(closed(schema), "#"))
    return _exact(own, Branches(own)) if strict else _relaxed(own)


# ---- The same in other words


def _respelled(schema: Any) -> Any:
    """Patterns in Rust's syntax, whole numbers without a point, and no word of a dialect that is not known."""
    if isinstance(schema, list):
        return [_respelled(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = with_inner(schema, _respelled)
    if isinstance(pattern := made.get("pattern"), str):
        made["pattern"] = in_rust(pattern)
    if isinstance(patterns := made.get("patternProperties"), dict):
        told: dict[str, Any] = {}
        for pattern, item in patterns.items():
            word = in_rust(pattern)
            told[word] = {"allOf": [told[word], item]} if word in told else item
        made["patternProperties"] = told
    for key in _COUNTS & made.keys():
        if isinstance(count := made[key], float) and count.is_integer():
            made[key] = int(count)
    if isinstance(dialect := made.get("$schema"), str) and not _DIALECT.fullmatch(dialect):
        del made["$schema"]
    return made


# ---- Numbers


def _rounded(key: str, value: Any, schema: Mapping[str, Any]) -> list[float]:
    """The numbers of a keyword's value that llguidance takes for others: it reads them as doubles."""
    match key:
        case "const" | "enum":
            return [number for number in _numbers(value) if not _is_exact(number)]
        case "minimum" | "exclusiveMinimum" | "maximum" | "exclusiveMaximum" if type_of(value) == "number":
            return [] if _is_held_to(key, value, schema) else [value]
    return []


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(item)
    elif type_of(value) == "number":
        yield value


def _is_exact(number: float) -> bool:
    """Whether a number is written as it is; beyond 64 bits that is a double's shortest digits and zeros."""
    try:
        held = float(number)
    except OverflowError:
        return False
    if held == _LEAST or isinstance(number, float):  # the first fills llguidance's stack
        return held != _LEAST
    return held == number if abs(number) <= _MOST else Decimal(repr(held)) == number


def _is_held_to(key: str, bound: float, schema: Mapping[str, Any]) -> bool:
    kinds = _kinds(schema)
    if key.startswith("exclusive") and kinds != {"number"}:  # of an integer 1 is taken away, or added
        return -_WHOLE < bound <= _WHOLE if key == "exclusiveMaximum" else -_WHOLE <= bound < _WHOLE
    if bound >= _MOST:
        return key == "maximum" and kinds == {"integer"}
    if bound < _LEAST or isinstance(bound, float):
        return True
    held = float(bound)
    return bound == (Decimal(repr(held)) if "number" in kinds else held)  # the shortest digits, or an integer's


def _kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    """Which of "integer" and "number" a value may be by its type, or by those of all branches; none if one is open."""
    either = [schema] if "type" in schema else schema.get("anyOf")
    if not isinstance(either, list) or not all(isinstance(branch, Mapping) and "type" in branch for branch in either):
        return frozenset()
    given = [branch["type"] for branch in either]
    types = [kind for some in given for kind in (some if isinstance(some, list) else [some])]
    return frozenset(kind for kind in types if kind in ("integer", "number"))


# ---- What is not strict


def _relaxed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_relaxed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    known = {key: item for key, item in schema.items() if _is_known(key, item, schema)}
    if "type" not in known and schema.keys() & {"const", "enum"} - known.keys():
        known["type"] = sorted({"integer" if type(value) is int else type_of(value) for value in listed(schema) or ()})
    made = with_inner(known, _relaxed)
    if "oneOf" in made:  # one at least is what can be said of it
        _say_any_of(made)
    if isinstance(patterns := made.get("patternProperties"), dict):
        told = {pattern: item for pattern, item in patterns.items() if is_regular(pattern)}
        told = told if never_meet([*told]) else {}
        if len(told) < len(patterns):  # what they allow goes for other properties now
            made["patternProperties"] = told
            made.pop("additionalProperties", None)
    return made


def _is_known(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    if _rounded(key, value, schema):
        return False
    match key:
        case "format":
            return isinstance(value, str) and value in _FORMATS
        case "pattern":
            return not isinstance(value, str) or is_regular(value)
        case "minimum" | "exclusiveMinimum" | "maximum" | "exclusiveMaximum":
            return not isinstance(value, int | float) or _is_near(key, value, schema)
        case "multipleOf":
            return remainders(str(value)) <= MOST_REMAINDERS
        case "minProperties" | "maxProperties":
            return not _has_optional(schema)
    return key not in _UNKNOWN


def _is_near(key: str, bound: float, schema: Mapping[str, Any]) -> bool:
    if key.endswith("inimum"):
        return _LEAST < bound < _FAR
    return bound > -_FAR and (bound < _MOST or _kinds(schema) == {"integer"})


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


def _exact(schema: Any, branches: Branches) -> Any:
    if isinstance(schema, list):
        return [_exact(item, branches) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = with_inner(schema, lambda item: _exact(item, branches))
    if made.get("propertyNames") in (True, {}, {"type": "string"}):  # as all names are
        del made["propertyNames"]
    either = schema.get("oneOf")
    if isinstance(either, list) and branches.are_apart(either):
        _say_any_of(made)
    return made
