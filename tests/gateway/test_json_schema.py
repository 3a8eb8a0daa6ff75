"""Schemas as documents: what references within them point to, and which properties their objects may have."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from gateway.json_schema import MAX_DEPTH, closed, moved, pointed_at, schemas_in
from tests.gateway.allocations import bytes_per_step

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


def test_the_way_to_a_schema_is_told_in_steps() -> None:
    inner = {"anyOf": [{}, {"items": {}}]}
    ways = ["".join(steps) for steps, _ in schemas_in({"properties": {"a": inner}, "const": {"not": {}}})]
    a = ".properties.a"
    assert ways == ["", a, f"{a}.anyOf[0]", f"{a}.anyOf[1]", f"{a}.anyOf[1].items"]


def test_a_long_name_is_not_copied_for_each_schema_below_it() -> None:
    below: dict[str, Any] = {str(index): {} for index in range(1000)}
    walk = schemas_in({"properties": {"k" * 100_000: {"properties": below}}})
    for _ in range(2):
        next(walk)
    assert bytes_per_step([partial(next, walk)] * len(below)) < 4096


def test_names_of_places_are_moved_along() -> None:
    properties = {"a/b": {"anyOf": [{"$anchor": "x"}, {"$id": "#y"}]}, "c": {"$ref": "#x"}, "d": {"$ref": "#y"}}
    made = moved({"properties": properties}, "#/$defs/f")["properties"]
    place = "#/$defs/f/properties/a~1b/anyOf"
    assert made == {"a/b": {"anyOf": [{}, {}]}, "c": {"$ref": f"{place}/0"}, "d": {"$ref": f"{place}/1"}}


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
