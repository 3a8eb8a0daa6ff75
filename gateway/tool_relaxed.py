"""A tool's schema as a promise that was not asked for: what verify's grammars cannot say is left out, not refused.

Calls of a strict function are held to all of its schema or refused; calls of another are held to as much as can be.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# What llguidance refuses outside its lenient mode, which goes for a grammar as a whole and so for strict tools as well.
_UNKNOWN = frozenset((
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties",
    "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor",
))  # fmt: skip
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[bB1-9]")  # or back, in a pattern
_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions"))  # what their keys are is the user's
_VALUES = frozenset(("const", "enum", "default", "examples"))


def relaxed(schema: Any) -> Any:
    """The schema without what no grammar can say. It allows all that the whole one does."""
    if isinstance(schema, list):
        return [relaxed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {key: _value(key, item) for key, item in schema.items() if _is_known(key, item)}
    if "oneOf" in made:  # one at least is what can be said of it
        either = made.pop("oneOf")
        made.setdefault("anyOf", either)
    return made


def _value(key: str, value: Any) -> Any:
    if key in _VALUES:
        return value
    if key in _BY_NAME and isinstance(value, Mapping):
        return {name: relaxed(item) for name, item in value.items()}
    return relaxed(value)


def _is_known(key: str, value: Any) -> bool:
    if key == "format":
        return value in _FORMATS if isinstance(value, str) else False
    if key == "pattern":
        return not (isinstance(value, str) and _LOOKS_AROUND.search(value))
    return key not in _UNKNOWN
