"""Grammars that the gateway writes, compiled by the verify service's own compiler: what they let through."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.constraints import (
    after_reasoning,
    calls_after_reasoning,
    of_response_format,
    of_schema,
    of_structured_outputs,
)  # fmt: skip
from gateway.reasoning import NAMES, reasoning_format
from gateway.schemas import JsonSchema, ResponseFormat, StructuredOutputs
from gateway.tool_parsers.formats import tool_format
from gateway.tool_schemas import FunctionDefinition, NamedFunction, Tool, ToolChoice, ToolChoiceObject
from gateway.tools import plan_tools
from outrider.errors import InvalidArgument
from outrider.v1 import common_pb2
from tests.gateway.compiling import Grammars

# A schema that refers to itself, from its root and from its definitions.
LIST: dict[str, Any] = {
    "type": "object",
    "properties": {"value": {"$ref": "#/$defs/value"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["value"],
    "additionalProperties": False,
    "$defs": {"value": {"type": "integer"}},
}
TOOLS = [
    Tool(type="function", function=FunctionDefinition(name="push", parameters=LIST, strict=True)),
    Tool(type="function", function=FunctionDefinition(name="now")),
]
SCHEMAS: Any = {"push": LIST, "now": {"type": "object"}}
GOOD = '{"value": 1, "next": {"value": 2, "next": null}}'
BAD = '{"value": 1, "next": {"value": "x"'


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        ({"choice": ["yes", 'no "never"', "žluť\n"]}, ["yes", 'no "never"', "žluť\n"], ["maybe", "no n"]),
        ({"regex": "[a-c]{3}"}, ["abc"], ["abd"]),
        ({"grammar": 'root ::= "a" "b"'}, ["ab"], ["b"]),
        ({"json": LIST}, [GOOD], [BAD]),
        ({"json": json.dumps(LIST)}, [GOOD], [BAD]),
        ({"json_object": True}, ['{"a": 1}'], ["[1]"]),
    ],
)
def test_structured_outputs(grammars: Grammars, asked: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = of_structured_outputs(msgspec.convert(asked, StructuredOutputs))
    assert [grammars.takes(grammar, text) for text in (*good, *bad)] == [True] * len(good) + [False] * len(bad)


def test_no_structured_outputs_are_free_text() -> None:
    assert of_structured_outputs(None) is of_structured_outputs(StructuredOutputs(json_object=False)) is None


@pytest.mark.parametrize("strict", [True, False, None])
def test_answers_have_no_properties_but_those_that_are_named(grammars: Grammars, strict: bool | None) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "object"}}, "required": ["a"]}
    asked = ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=schema, strict=strict))
    for grammar in (of_response_format(asked), of_structured_outputs(StructuredOutputs(json=schema))):
        assert grammars.takes(grammar, '{"a": 1, "b": {"any": "thing"}}')
        assert not grammars.takes(grammar, '{"a": 1, "c"')


@pytest.mark.parametrize(("parallel", "second"), [(True, True), (False, False)])
def test_required_calls(grammars: Grammars, parallel: bool, second: bool) -> None:
    plan = plan_tools(TOOLS, "required", parallel)
    assert plan is not None
    grammar = of_schema(plan.forced_schema())
    assert grammars.takes(grammar, f'[{{"name": "push", "arguments": {GOOD}}}]')
    assert not grammars.takes(grammar, f'[{{"name": "push", "arguments": {BAD}')
    assert not grammars.takes(grammar, '[{"name": "pop"')
    assert grammars.takes(grammar, '[{"name": "now", "arguments": {}}, {"name": "now"') == second


# Each is in no grammar that verify has: as pydantic writes sets, paths and decimals, and as people write schemas.
UNSAID: list[dict[str, Any]] = [
    {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    *({"type": "string", "format": name} for name in ("path", "password", "binary", "json-string", "no such")),
    {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
    {"type": "string", "pattern": r"\bx\b"},
    {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]},
    {"type": "string", "not": {"const": ""}},
    {"type": "array", "contains": {"type": "string"}, "minContains": 2},
    {"type": "object", "propertyNames": {"minLength": 1}, "dependentRequired": {"a": ["b"]}},
    {"type": "object", "if": {}, "then": {}, "else": {}, "unevaluatedProperties": False},
    {"type": "object", "dependentSchemas": {"a": {}}, "dependencies": {"a": ["b"]}},
    {"type": "object", "patternProperties": {"^(?=a)b": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {}}, "minProperties": 1},
    {"type": "array", "items": {"type": "integer", "minimum": 10**20, "multipleOf": 7}},
    {"type": "array", "items": {"type": "number", "maximum": 2**64}},
    {"type": "array", "items": {"type": "integer", "multipleOf": 2**31}},
    {"type": "string", "minLength": 1, "anyOf": [{}], "oneOf": [{"type": "string"}, {"type": ["string", "null"]}]},
]


@pytest.mark.parametrize("schema", UNSAID)
@pytest.mark.parametrize("choice", ["required", "named"])
def test_calls_of_tools_that_are_not_strict_have_any_schema(
    grammars: Grammars, schema: dict[str, Any], choice: str
) -> None:
    def grammar(*, strict: bool) -> common_pb2.Grammar:
        function = FunctionDefinition(name="f", parameters={"properties": {"not": schema}}, strict=strict)
        named = ToolChoiceObject(type="function", function=NamedFunction(name="f"))
        plan = plan_tools([Tool(type="function", function=function)], named if choice == "named" else "required", None)
        assert plan is not None
        return of_schema(plan.forced_schema())

    before = "" if choice == "named" else '[{"name": "f", "arguments": '
    assert grammars.takes(grammar(strict=False), f'{before}{{"not": ')
    assert not grammars.takes(grammar(strict=False), f'{before}{{"not": 5')
    with pytest.raises(InvalidArgument):
        grammars.takes(grammar(strict=True), "")


@pytest.mark.parametrize("schema", UNSAID)
def test_answers_have_any_schema_unless_it_is_strict(grammars: Grammars, schema: dict[str, Any]) -> None:
    def grammar(*, strict: bool | None) -> common_pb2.Grammar | None:
        asked = JsonSchema(schema={"type": "array", "items": schema}, strict=strict)
        return of_response_format(ResponseFormat(type="json_schema", json_schema=asked))

    for strict in (False, None):
        assert grammars.takes(grammar(strict=strict), "[")
        assert not grammars.takes(grammar(strict=strict), "[5")
    with pytest.raises(InvalidArgument):
        grammars.takes(grammar(strict=True), "")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "pattern": r"^a\\b$"}, r'"a\\b"', '"b'),  # a backslash and a letter
        ({"type": "string", "pattern": r"^[(?=\]]b$"}, '"(b"', '"b'),
        ({"type": "integer", "maximum": 2**63 - 1}, "9223372036854775807", "9223372036854775808"),
        ({"oneOf": [{"type": "string", "maxLength": 1}, {"type": "null"}]}, '"a"', '"ab'),
        ({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "maxProperties": 1},
         '{"a": null}', '{"a": null, '),
        ({"type": "object", "patternProperties": {"^a$": {"type": "null"}}, "additionalProperties": False},
         '{"a": null}', '{"b'),
    ],
)  # fmt: skip
def test_what_can_be_said_is_held_to_though_not_strict(
    grammars: Grammars, schema: dict[str, Any], good: str, bad: str
) -> None:
    asked = ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=schema))
    assert grammars.takes(of_response_format(asked), good)
    assert not grammars.takes(of_response_format(asked), bad)


def tagged(kind: str, **properties: Any) -> dict[str, Any]:
    """A branch of a union, as pydantic writes them."""
    properties = {"kind": {"const": kind, "type": "string"}, **properties}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


UNION = {"oneOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/node"}, {"type": "null"}]}


def test_strict_unions_of_what_is_defined_elsewhere(grammars: Grammars) -> None:
    def grammar(**defs: Any) -> common_pb2.Grammar | None:
        schema = {"type": "array", "items": UNION, "$defs": defs}
        return of_response_format(
            ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=schema, strict=True))
        )

    node = tagged("node", of={"type": "array", "items": UNION})
    trees = grammar(leaf=tagged("leaf", size={"type": "integer"}), node=node)
    assert grammars.takes(
        trees, '[{"kind": "leaf", "size": 1}, null, {"kind": "node", "of": [{"kind": "leaf", "size": 2}, null]}]'
    )
    assert not grammars.takes(trees, '[{"kind": "node", "size"')
    assert not grammars.takes(trees, '[{"kind": "node", "of": [{"kind": "leaf", "of"')
    optional = {**tagged("leaf"), "required": []}
    for leaf in (node, optional, tagged("node"), {"type": "null"}, {"$ref": "#/$defs/node"}, {}):
        with pytest.raises(InvalidArgument):  # a value may match two
            grammars.takes(grammar(leaf=leaf, node=node), "")


def test_strict_names_that_may_be_any(grammars: Grammars) -> None:
    def grammar(names: dict[str, Any]) -> common_pb2.Grammar | None:
        schema = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}
        return of_response_format(
            ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=schema, strict=True))
        )

    assert grammars.takes(grammar({"type": "string"}), '{"a": 1}')
    with pytest.raises(InvalidArgument):
        grammars.takes(grammar({"type": "string", "maxLength": 1}), "")


def named_inside(kind: str, **names: str) -> dict[str, Any]:
    """A schema whose definition goes by names of its own."""
    of_all = names.get("$id", "#")[0] != "#"
    reference = "s.json#/$defs/C" if of_all else "#foo"
    inner = {"type": kind, **({} if of_all else names)}
    return {
        **(names if of_all else {}), "type": "object", "properties": {"c": {"$ref": reference}},
        "required": ["c"], "additionalProperties": False, "$defs": {"C": inner},
    }  # fmt: skip


@pytest.mark.parametrize(
    "names", [{"$anchor": "foo"}, {"$id": "#foo"}, {"$id": "https://x.y/s.json"}, {"$id": "s.json"}]
)
@pytest.mark.parametrize("strict", [True, False])
def test_names_within_a_schema_are_its_own(grammars: Grammars, names: dict[str, str], strict: bool) -> None:
    tools = [
        Tool(
            type="function",
            function=FunctionDefinition(name=name, parameters=named_inside(kind, **names), strict=strict),
        )
        for name, kind in (("a", "integer"), ("b", "boolean"))
    ]
    plan, hermes = plan_tools(tools, "required", None), tool_format("hermes", None)
    assert plan is not None
    assert hermes.strict is not None
    free = common_pb2.Grammar(ebnf=hermes.strict(plan.parameters()))
    for grammar, before in ((of_schema(plan.forced_schema()), "["), (free, "<tool_call>\n")):
        assert grammars.takes(grammar, before + '{"name": "a", "arguments": {"c": 1}}')
        assert grammars.takes(grammar, before + '{"name": "b", "arguments": {"c": true}}')
        assert not grammars.takes(grammar, before + '{"name": "a", "arguments": {"c": t')
        assert not grammars.takes(grammar, before + '{"name": "b", "arguments": {"c": 1')


def test_values_in_a_schema_are_no_schemas(grammars: Grammars) -> None:
    properties = {"op": {"const": {"$ref": "#/a", "$id": "x", "not": 1}}, "const": {"$ref": "#/$defs/flag"}}
    parameters = {"properties": properties, "required": [*properties], "$defs": {"flag": {"type": "boolean"}}}
    for strict in (True, False):
        function = FunctionDefinition(name="f", parameters=parameters, strict=strict)
        plan = plan_tools([Tool(type="function", function=function)], "required", None)
        assert plan is not None
        grammar = of_schema(plan.forced_schema())
        before = '[{"name": "f", "arguments": {"op": {"$ref": "#/a", "$id": "x", "not": 1}, "const": '
        assert grammars.takes(grammar, before + "true")
        assert not grammars.takes(grammar, before + "1")


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"city": {"type": "string"}}}, {"$ref": "#/$defs/a", "$defs": {"a": {"required": ["city"]}}},
        {"anyOf": [{"required": ["city"]}, {"required": ["zip"]}]}, {}, None,
    ],
)  # fmt: skip
@pytest.mark.parametrize("strict", [True, False])
def test_arguments_are_objects(grammars: Grammars, parameters: dict[str, Any] | None, strict: bool) -> None:
    tool = Tool(type="function", function=FunctionDefinition(name="f", parameters=parameters, strict=strict))
    named = ToolChoiceObject(type="function", function=NamedFunction(name="f"))
    hermes = tool_format("hermes", None)
    assert hermes.strict is not None
    choices: list[tuple[ToolChoice, str]] = [
        (named, ""), ("required", '[{"name": "f", "arguments": '),
        ("auto", '<tool_call>\n{"name": "f", "arguments": '),
    ]  # fmt: skip
    for choice, before in choices:
        plan = plan_tools([tool], choice, None)
        assert plan is not None
        free = common_pb2.Grammar(ebnf=hermes.strict(plan.parameters()))
        grammar = of_schema(plan.forced_schema()) if plan.forced else free
        assert grammars.takes(grammar, f'{before}{{"city": "Rome"') is bool(parameters)
        assert grammars.takes(grammar, before + "{}") or parameters
        for text in ('"Paris, France"', "[", "5", "null"):
            assert not grammars.takes(grammar, before + text)


def test_strict_calls_within_text(grammars: Grammars) -> None:
    hermes = tool_format("hermes", None)
    assert hermes.strict is not None
    grammar = common_pb2.Grammar(ebnf=hermes.strict(SCHEMAS))
    call = f'<tool_call>\n{{"name": "push", "arguments": {GOOD}}}\n</tool_call>'
    assert grammars.takes(grammar, "Well, < and { are free.")
    assert grammars.takes(grammar, f"Well.\n{call}\n{call} And on.")
    assert not grammars.takes(grammar, f'<tool_call>\n{{"name": "push", "arguments": {BAD}')
    assert not grammars.takes(grammar, '<tool_call>\n{"name": "pop"')


def test_strict_calls_alone(grammars: Grammars) -> None:
    llama = tool_format("llama3_json", None)
    assert llama.strict is not None
    grammar = common_pb2.Grammar(ebnf=llama.strict(SCHEMAS))
    call = f'{{"name": "push", "parameters": {GOOD}}}'
    assert grammars.takes(grammar, "Free text, with { in it.")
    assert grammars.takes(grammar, f"{call}; {call}")
    assert not grammars.takes(grammar, f'{{"name": "push", "parameters": {BAD}')


@pytest.mark.parametrize(
    "grammar", [common_pb2.Grammar(json_object=True), of_schema({"type": "object", "properties": {"a": {"const": 1}}})]
)
def test_reasoning_before_an_answer(grammars: Grammars, grammar: common_pb2.Grammar) -> None:
    form = reasoning_format("qwen3")
    assert form is not None
    free = after_reasoning(grammar, form, inside=False)
    assert grammars.takes(free, '{"a": 1}')
    assert grammars.takes(free, '<think>\nWhat < is {?\n</think>\n\n{"a": 1}')
    assert not grammars.takes(free, "Well")
    assert not grammars.takes(free, "<think>x</think>\nWell")
    inside = after_reasoning(grammar, form, inside=True)
    assert grammars.takes(inside, 'What?</think>{"a": 1}')
    assert not grammars.takes(inside, 'What?</think>["a"')
    assert after_reasoning(common_pb2.Grammar(regex="a+"), form, inside=True) is None


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hermes", '<tool_call>\n{"name": "push", "arguments": %s}\n</tool_call>'),
        ("llama3_json", '{"name": "push", "parameters": %s}'),
    ],
)
def test_reasoning_before_strict_calls(grammars: Grammars, name: str, call: str) -> None:
    calls, form = tool_format(name, None), reasoning_format("qwen3")
    assert calls.strict is not None
    assert form is not None
    good, bad = call % GOOD, (call % BAD).partition('"x"')[0] + '"x"'
    free = calls_after_reasoning(calls.strict(SCHEMAS), form, inside=False)
    for text in ("", "<think>Hm.</think>\n\n", " \n<think>What is { in\n<tool_call>?</think>"):
        assert grammars.takes(free, f"{text}{good}")
        assert grammars.takes(free, f"{text}Well, < and {{ are free.")
        assert not grammars.takes(free, f"{text}{bad}")
    assert grammars.takes(free, f"<think>{bad} does not do.</think>{good}")
    inside = calls_after_reasoning(calls.strict(SCHEMAS), form, inside=True)
    assert grammars.takes(inside, f"{bad} does not do.</think>\n{good}")
    assert grammars.takes(inside, "Hm.</think>Well.")
    assert not grammars.takes(inside, f"Hm.</think>\n{bad}")


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_in_every_format_goes_before_strict_calls(grammars: Grammars, name: str) -> None:
    calls, form = tool_format("llama3_json", None), reasoning_format(name)
    assert calls.strict is not None
    assert form is not None
    grammar = calls_after_reasoning(calls.strict(SCHEMAS), form, inside=False)
    thoughts = f"{form.begin}\nHm.\n{form.end}\n"
    assert grammars.takes(grammar, f'{thoughts}{{"name": "push", "parameters": {GOOD}}}')
    assert not grammars.takes(grammar, f'{thoughts}{{"name": "push", "parameters": {BAD}')
