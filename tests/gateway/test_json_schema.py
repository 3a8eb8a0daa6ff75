"""Schemas as documents: what references within them point to, and which properties their objects may have."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.json_schema import MAX_DEPTH, closed, pointed_at

DOCUMENT: dict[str, Any] = {"$defs": {"a/b~c %": 1, "list": [2]}, "type": "object"}


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        ("#", DOCUMENT), ("#/type", "object"), ("#/$defs/a~1b~0c%20%25", 1), ("#/%24defs/a%7E1b~0c %25", 1),
        ("#/$defs/a%2Fb~0c %25", 1), ("#/none", None), ("#/type/none", None), ("#/$defs/list/0", None),
        ("#anchor", None), ("s.json#/type", None), ("", None),
    ],
)  # fmt: skip
def test_references_are_followed_step_by_step(reference: str, found: object) -> None:
    assert pointed_at(DOCUMENT, reference) == found


def test_no_reference_goes_deeper_than_schemas_do() -> None:
    document: dict[str, Any] = {}
    document["a"] = document
    assert pointed_at(document, "#" + "/a" * MAX_DEPTH) is document
    assert pointed_at(document, "#" + "/a" * (MAX_DEPTH + 1)) is None


TEXT = {"type": "string"}
NO_OTHERS = {"additionalProperties": False}
A = {"properties": {"a": TEXT}}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"properties": {"a": TEXT}}, {"properties": {"a": TEXT}, **NO_OTHERS}),
        ({"properties": {}}, {"properties": {}, **NO_OTHERS}),
        (
            {"properties": {"a": {"properties": {"b": TEXT}}, "c": {"items": A}}},
            {"properties": {"a": {"properties": {"b": TEXT}, **NO_OTHERS},
                            "c": {"items": {**A, **NO_OTHERS}}}, **NO_OTHERS},
        ),
        (
            {"properties": {"a": {"anyOf": [A, {"type": "null"}]}}},
            {"properties": {"a": {"anyOf": [{**A, **NO_OTHERS}, {"type": "null"}]}}, **NO_OTHERS},
        ),
        (
            {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"properties": {"b": TEXT}}}},
            {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"properties": {"b": TEXT}, **NO_OTHERS}},
             **NO_OTHERS},
        ),
    ],
)  # fmt: skip
def test_objects_that_are_silent_on_others_have_none(given: dict[str, Any], found: dict[str, Any]) -> None:
    assert closed(given) == found


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"properties": {"a": TEXT}, "additionalProperties": True},
        {"properties": {"a": TEXT}, "patternProperties": {"^x": TEXT}},
        {"properties": {"a": TEXT}, "required": ["b"]},
        {"properties": {"a": TEXT}, "minProperties": 2},
        {"properties": {"a": TEXT}, "anyOf": [{"properties": {"b": TEXT}}, {"properties": {"c": TEXT}}]},
        {"allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": TEXT}}], "$defs": {"A": {"properties": {"a": TEXT}}}},
        {"enum": [{"properties": {}}]},
        {"properties": {"a": TEXT}, "required": ["a"], "dependentRequired": {"a": ["b"]}},
        {"properties": {"k": TEXT}, "required": ["k"], "anyOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": A}},
        {"properties": {"k": TEXT}, "required": ["k"], "oneOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": A}},
        {"required": ["x"], "anyOf": [A, {"properties": {"b": TEXT}}]},
        {"$ref": "#/$defs/A", "anyOf": [{"properties": {"b": TEXT}}], "$defs": {"A": A}},
        {"$ref": "#/$defs/A", "required": ["x"], "$defs": {"A": A}},
        {"allOf": [A], "anyOf": [{"properties": {"b": TEXT}}]},
        {"patternProperties": {"^x": TEXT}, "anyOf": [A]},
        {"properties": {"a": A, "b": {"allOf": [{"$ref": "#/properties/a"}, {"properties": {"c": TEXT}}]}}},
        {"$ref": "#/$defs/A", "$defs": {"A": {"required": ["x"], "anyOf": [A]}}},
    ],
)
def test_others_stay_open(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema
