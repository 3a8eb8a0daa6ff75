"""Schemas as documents: what references within them point to."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.json_schema import MAX_DEPTH, pointed_at

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
