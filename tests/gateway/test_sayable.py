"""JSON schemas in the words that grammars have, compiled by verify's own compiler: what they let through."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.constraints import of_response_format
from gateway.schemas import JsonSchema, ResponseFormat
from outrider.errors import InvalidArgument
from outrider.v1 import common_pb2
from tests.gateway.compiling import Grammars


def of_answer(schema: dict[str, Any], *, strict: bool) -> common_pb2.Grammar | None:
    """The grammar of a `response_format`."""
    asked = JsonSchema(schema=schema, strict=strict)
    return of_response_format(ResponseFormat(type="json_schema", json_schema=asked))


def objects(tag: Any, **properties: Any) -> dict[str, Any]:
    """A branch that one value of `k` tells from others."""
    properties = {"k": {"const": tag}, **properties}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


@pytest.mark.parametrize(
    ("branches", "good", "bad"),
    [
        ([{"const": 1}, {"const": 2}], "2", "3"),
        ([{"enum": [1, 2]}, {"enum": [3, "a"]}, {"const": "b"}, {"const": None}], '"b"', '"c'),
        ([{"const": 1}, {"const": True}], "true", "f"),
        ([{"type": "integer", "minimum": 0, "maximum": 4}, {"type": "integer", "minimum": 5, "maximum": 9}], "7", "-"),
        ([{"type": "number", "exclusiveMinimum": 5}, {"type": "number", "minimum": 3, "maximum": 5}], "5.5", "2."),
        ([{"const": 1}, {"type": "integer", "minimum": 2, "maximum": 3}], "3", "4"),
        ([objects(1), objects(2, a={"type": "null"})], '{"k": 2, "a": null}', '{"k": 3'),
        ([objects(1), objects("a")], '{"k": "a"}', '{"k": 2'),
    ],
)  # fmt: skip
def test_strict_branches_that_values_tell_apart(grammars: Grammars, branches: list[Any], good: str, bad: str) -> None:
    grammar = of_answer({"oneOf": branches}, strict=True)
    assert grammars.takes(grammar, good)
    assert not grammars.takes(grammar, bad)


@pytest.mark.parametrize(
    "branches",
    [
        [{"const": 1}, {"const": 1.0}],
        [{"enum": [1, 2]}, {"enum": [2, 3]}],
        [{"const": 7}, {"type": "integer", "minimum": 2}],
        [{"type": "integer", "maximum": 5}, {"type": "number", "minimum": 5}],
        [{"type": "array", "items": {"const": 1}}, {"const": [1]}],
        [objects(1), objects(True), objects(1.0)],
        [objects([1]), objects([1])],
    ],
)
def test_strict_branches_that_may_be_both_true(grammars: Grammars, branches: list[Any]) -> None:
    with pytest.raises(InvalidArgument, match="oneOf"):
        grammars.takes(of_answer({"oneOf": branches}, strict=True), "")


BIG = 1234567890123456789


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"user": {"type": "integer", "enum": [1, BIG]}}}, f"{BIG} in 'properties.user.enum'"),
        ({"anyOf": [{"type": "null"}, {"const": {"id": [-BIG]}}]}, f"-{BIG} in 'anyOf[1].const'"),
        ({"type": "integer", "minimum": 2**53 + 1}, f"{2**53 + 1} in 'minimum'"),
        ({"type": "integer", "minimum": 2**64, "maximum": 2**64}, f"{2**64} in 'minimum'"),
        ({"type": "number", "maximum": 2**64}, f"{2**64} in 'maximum'"),
        ({"type": "integer", "exclusiveMinimum": 2**55}, f"{2**55} in 'exclusiveMinimum'"),
        ({"const": 2**64 - 1}, f"{2**64 - 1} in 'const'"),
    ],
)
def test_numbers_that_a_strict_schema_would_have_rounded(
    grammars: Grammars, schema: dict[str, Any], place: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        of_answer(schema, strict=True)
    assert f"to {place}." in refused.value.message
    assert grammars.takes(of_answer(schema, strict=False), "")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"enum": [2**60, 10**20, 1.5]}, "1152921504606846976", "2"),
        ({"const": 10**20}, "100000000000000000000", "2"),
        ({"type": "integer", "minimum": 10**17, "maximum": 10**17}, "100000000000000000", "100000000000000001"),
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, "9223372036854775807", "9223372036854775808"),
        ({"const": {"default": 1}, "default": BIG}, '{"default": 1}', "2"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_large_numbers_that_are_held_to(
    grammars: Grammars, schema: dict[str, Any], good: str, bad: str, strict: bool
) -> None:
    assert grammars.takes(of_answer(schema, strict=strict), good)
    assert not grammars.takes(of_answer(schema, strict=strict), bad)


def test_values_that_would_be_rounded_leave_their_types(grammars: Grammars) -> None:
    schema = {"type": "array", "prefixItems": [{"const": BIG}, {"enum": [BIG, "a"]}, {"type": "null", "enum": [BIG]}]}
    grammar = of_answer(schema, strict=False)
    assert grammars.takes(grammar, f'[{BIG}, "b", null')
    assert not grammars.takes(grammar, "[n")
    assert not grammars.takes(grammar, "[1, n")


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^[a[b]c]$", "[c]", "a"),
        (r"^[^[]{2,3}$", "ab", "a["),
        (r"^[[(]x$", "[x", "ax"),
        (r"^[+--]$", ",", "/"),
        (r"^[--/]$", ".", "+"),
        (r"^[a-c\--/z-]$", ".", "+"),
        (r"^[a&&b]$", "&", "c"),
        (r"^[^~~\]]$", "a", "~"),
        (r"^[[:alpha:]]$", "[]", "b"),
        (r"^{a}$", "{a}", "a"),
        (r"^a{,2}$", "a{,2}", "aa"),
        (r"^a{2}$", "aa", "a{"),
        (r"^\ud83d\ude00[\ud83d\ude00]$", "😀😀", "a"),
        (r"^\p{Lu}\u0041\x41$", "ÀAA", "aAA"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_patterns_mean_what_they_do_in_javascript(
    grammars: Grammars, pattern: str, good: str, bad: str, strict: bool
) -> None:
    of_text = of_answer({"type": "string", "pattern": pattern}, strict=strict)
    names = {"type": "object", "patternProperties": {pattern: {}}, "additionalProperties": False}
    of_name = of_answer(names, strict=strict)
    assert grammars.takes(of_text, f'"{good}"')
    assert grammars.takes(of_name, f'{{"{good}": 1}}')
    assert not grammars.takes(of_text, f'"{bad}"')
    assert not grammars.takes(of_name, f'{{"{bad}":')


@pytest.mark.parametrize("strict", [True, False])
def test_one_pattern_spelled_in_two_ways(grammars: Grammars, strict: bool) -> None:
    patterns = {"^[[]$": {"type": "integer"}, r"^[\[]$": {"maximum": 5}}
    grammar = of_answer({"type": "object", "patternProperties": patterns, "additionalProperties": False}, strict=strict)
    assert grammars.takes(grammar, '{"[": 5}')
    assert not grammars.takes(grammar, '{"[": 6}')


@pytest.mark.parametrize(
    ("patterns", "told"),
    [
        ({"^x": {"type": "null"}, "y$": {"type": "null"}}, False),
        ({"^x": {"type": "null"}, "^xy": {"type": "null"}}, False),
        ({"^x": {"type": "null"}, "^y": {"type": "null"}}, True),
        ({"^ab$": {"type": "null"}, "^a-b$": {"type": "null"}}, True),
    ],
)
def test_names_that_match_two_patterns_may_be_anything(
    grammars: Grammars, patterns: dict[str, Any], told: bool
) -> None:
    schema = {"type": "object", "patternProperties": patterns, "additionalProperties": False}
    grammar = of_answer(schema, strict=False)
    assert grammars.takes(grammar, '{"z": 1}') is not told
    assert grammars.takes(grammar, "{}")


@pytest.mark.parametrize("strict", [True, False])
def test_counts_with_a_point_and_unknown_dialects(grammars: Grammars, strict: bool) -> None:
    text = {"$schema": "https://x.y/dialect", "type": "string", "minLength": 1.0, "maxLength": 2.0}
    schema = {"$schema": "http://json-schema.org/schema#", "type": "array", "items": text, "maxItems": 2.0}
    grammar = of_answer(schema, strict=strict)
    assert grammars.takes(grammar, '["a", "bc"]')
    assert not grammars.takes(grammar, '["abc"')
    draft4 = {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 3, "exclusiveMinimum": True}
    assert not grammars.takes(of_answer({"type": "integer", **draft4}, strict=strict), "3,")
