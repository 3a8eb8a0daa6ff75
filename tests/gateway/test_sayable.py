"""JSON schemas in the words that grammars have, compiled by verify's own compiler: what they let through."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.constraints import of_response_format, of_sglang
from gateway.field_names import Names
from gateway.schemas import JsonSchema, ResponseFormat, SglangSampling
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
        ({"type": "integer", "exclusiveMinimum": 2**53}, f"{2**53} in 'exclusiveMinimum'"),
        ({"type": "integer", "exclusiveMaximum": -(2**53)}, f"-{2**53} in 'exclusiveMaximum'"),
        ({"type": ["integer", "number"], "exclusiveMaximum": 10**16}, f"{10**16} in 'exclusiveMaximum'"),
        ({"type": "number", "exclusiveMaximum": 2**62}, f"{2**62} in 'exclusiveMaximum'"),
        ({"type": "number", "maximum": 2**62}, f"{2**62} in 'maximum'"),
        ({"anyOf": [{"type": "integer"}, {}], "maximum": 2**64}, f"{2**64} in 'maximum'"),
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


def test_a_schema_that_comes_as_a_text_is_strict() -> None:
    for schema in ({"pattern": r"^\d$"}, {"oneOf": [{"const": 1}, {"const": 2}]}, {"not": {}}):
        given = SglangSampling(json_schema=json.dumps(schema, indent=1))
        assert of_sglang(given, Names()) == of_answer(schema, strict=True)
    for text in ("true", "[]"):  # verify tells what it makes of them
        assert of_sglang(SglangSampling(json_schema=text), Names()) == common_pb2.Grammar(json_schema=text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (json.dumps({"properties": {"user": {"const": BIG}}}), f"to {BIG} in 'properties.user.const'."),
        ('{"not": ' * 40 + "{}" + "}" * 40, "more than 32 levels deep"),
        ('{"type": ', "no JSON"),
        ('{"minimum": NaN}', "no JSON"),
        ('{"const": 1, "const": 2}', "no JSON: repeated key"),
        ("[" * 30_000, "no JSON"),
    ],
)
def test_a_text_that_is_no_schema_we_hold_output_to(text: str, complaint: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        of_sglang(SglangSampling(json_schema=text), Names(inside="sampling_params."))
    assert complaint in refused.value.message
    assert (refused.value.field, refused.value.code) == ("sampling_params.json_schema", "invalid_json_schema")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"enum": [2**60, 10**20, 1.5]}, "1152921504606846976", "2"),
        ({"const": 10**20}, "100000000000000000000", "2"),
        ({"type": "integer", "minimum": 10**17, "maximum": 10**17}, "100000000000000000", "100000000000000001"),
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, "9223372036854775807", "9223372036854775808"),
        ({"type": "integer", "exclusiveMaximum": 2**53}, "9007199254740991", "9007199254740992"),
        ({"type": "integer", "exclusiveMinimum": -(2**53)}, "-9007199254740991", "-9007199254740992"),
        ({"type": "number", "exclusiveMinimum": -1e16, "exclusiveMaximum": 1e16}, "-9999999999999999.5", f"-{10**16}"),
        ({"type": "number", "exclusiveMaximum": 10**17}, "99999999999999999.5", "100000000000000000"),
        ({"type": "number", "exclusiveMaximum": 1e18}, "999999999999999999", "1000000000000000000"),
        ({"type": ["null", "integer"], "maximum": 2**63 - 1}, "9223372036854775807", "9223372036854775808"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}], "minimum": 0, "maximum": 2**64 - 1}, "9223372036", "-"),
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
        (r"^\p{Script=Latin}[\P{Script=Latin}]{2}$", "é{1", "1"),
        (r"^[a-z-9]$", "-", "8"),
        (r"^[a-c--]$", "-", "d"),
        (r"^[^]b$", "]b", "]]"),
        (r"^\<\>[\<]$", "<><", "a"),
        (r"^[\b\0]?\0?a$", "a", "b"),
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


@pytest.mark.parametrize(
    "pattern", [r"^\ud8zz\udcyy$", r"^\ud83d$", r"^[]a]$", r"^\01$", r"^[\q]$", r"^\x4$", r"^\cA$"]
)
def test_patterns_that_only_strict_schemas_are_refused_for(grammars: Grammars, pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert grammars.takes(of_answer(schema, strict=False), '"anything"')
    with pytest.raises(InvalidArgument):
        grammars.takes(of_answer(schema, strict=True), "")


def test_complaints_quote_patterns_as_they_came(grammars: Grammars) -> None:
    for pattern in ("[A-Za-z0-9_+-]@(?=x)", "[a&b~-](?=x)"):
        with pytest.raises(InvalidArgument) as refused:
            grammars.takes(of_answer({"type": "string", "pattern": pattern}, strict=True), "")
        assert pattern in refused.value.message


@pytest.mark.parametrize("strict", [True, False])
def test_one_pattern_spelled_in_two_ways(grammars: Grammars, strict: bool) -> None:
    patterns = {"^[[]$": {"type": "integer"}, r"^[\[]$": {"maximum": 5}}
    grammar = of_answer({"type": "object", "patternProperties": patterns, "additionalProperties": False}, strict=strict)
    assert grammars.takes(grammar, '{"[": 5}')
    assert not grammars.takes(grammar, '{"[": 6}')


@pytest.mark.parametrize(
    ("patterns", "told"),
    [
        (("^x", "y$"), False),
        (("^x", "^xy"), False),
        (("^x", "^y"), True),
        (("^ab$", "^a-b$"), True),
        (("^[a-z]+$", "^[0-9]+$"), True),
        (("^S_.*$", "^I_.*$"), True),
        (("^a$", "^ab"), True),
        (("^$", "^a"), True),
        ((r"^\d{4}$", r"^\d{4}-\d{2}$"), True),
        ((r"^[^\d]", "^[0-9]"), True),
        (("^é", "^ü"), True),
        (("^[^é]", "^é"), False),
        (("^a{2}{0}b", "^b"), False),
        (("^a{1000}$", "^a{10}$"), False),
        (("^a*b", "^b"), False),
        (("^a|b", "^b"), False),
        (("^.", "^a"), False),
    ],
)
def test_names_that_match_two_patterns_may_be_anything(
    grammars: Grammars, patterns: tuple[str, ...], told: bool
) -> None:
    allowed = {pattern: {"type": "null"} for pattern in patterns}
    schema = {"type": "object", "patternProperties": allowed, "additionalProperties": False}
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
