"""Parameters that are bare text, as JSON: the function's schema tells text from numbers, truth and the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gateway.json_schema import pointed_at
from gateway.tool_parsers.json_text import encodable

Types = frozenset[str]
_ANY: Types = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))


class Parameters:
    """The parameters of one function by its schema, which is a client's: anything may stand anywhere in it."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root = schema
        if isinstance(reference := schema.get("$ref"), str) and isinstance(
            found := pointed_at(schema, reference), Mapping
        ):
            schema = {**found, **schema}
        properties = schema.get("properties")
        self._schemas: dict[str | None, Any] = {
            None: schema.get("additionalProperties"), **(properties if isinstance(properties, Mapping) else {})
        }  # fmt: skip
        self._by_key: dict[str | None, Types] = {}
        self._by_reference: dict[str, Types] = {}  # none while one is followed, so that circles end

    def as_json(self, key: str, value: str) -> str:
        """A parameter's value as JSON. What may be text is text, but for null where that may be too. What cannot be is
        JSON where it can be read.

        So is what nothing is said of. True, False and None are read as templates print them, in Python's way.
        """
        types, word = self._types_of(key), value.strip()
        if types != _ANY:
            if "null" in types and word in ("null", "None"):
                return "null"
            if "string" in types:
                return json.dumps(value, ensure_ascii=False)
            if "boolean" in types and word.lower() in ("true", "false"):
                return word.lower()
        try:
            return encodable(json.dumps(json.loads(value), ensure_ascii=False, allow_nan=False))
        except (ValueError, RecursionError):
            return json.dumps(value, ensure_ascii=False)

    def _types_of(self, key: str) -> Types:
        """The types that a parameter may have."""
        known = key if key in self._schemas else None
        if known not in self._by_key:
            try:
                self._by_key[known] = self._types(self._schemas[known])
            except RecursionError:  # references may go on and on
                self._by_key[known] = _ANY
        return self._by_key[known]

    def _types(self, schema: Any) -> Types:
        """The types that every keyword of a schema allows."""
        if not isinstance(schema, Mapping):
            return _ANY
        types = _ANY
        if isinstance(given := schema.get("type"), str):
            types &= {given}
        elif isinstance(given, list):
            types &= {name for name in given if isinstance(name, str)}
        if isinstance(values := schema.get("enum"), list):
            types &= {_type_of(value) for value in values}
        if "const" in schema:
            types &= {_type_of(schema["const"])}
        for keyword in ("anyOf", "oneOf"):
            if isinstance(either := schema.get(keyword), list):
                types &= frozenset[str]().union(*map(self._types, either))
        if isinstance(every := schema.get("allOf"), list):
            types = types.intersection(*map(self._types, every))
        if isinstance(reference := schema.get("$ref"), str):
            types &= self._types_at(reference)
        return types

    def _types_at(self, reference: str) -> Types:
        if reference not in self._by_reference:
            self._by_reference[reference] = frozenset()
            self._by_reference[reference] = self._types(pointed_at(self._root, reference))
        return self._by_reference[reference]


def _type_of(value: Any) -> str:
    if isinstance(value, str):
        return "string"
    if isinstance(value, bool):
        return "boolean"
    return "null" if value is None else "number"  # or another that is written as JSON
