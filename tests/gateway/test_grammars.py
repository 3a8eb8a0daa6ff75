"""Grammars that the gateway writes, compiled by the verify service's own compiler: what they let through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from gateway.constraints import after_reasoning, calls_after_reasoning, of_schema
from gateway.reasoning import NAMES, reasoning_format
from gateway.tool_parsers.formats import tool_format
from gateway.tool_schemas import FunctionDefinition, NamedFunction, Tool, ToolChoice, ToolChoiceObject
from gateway.tools import plan_tools
from outrider.errors import InvalidArgument
from outrider.v1 import common_pb2
from verify_service.grammar import GrammarCompiler

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


class Grammars:
    """Compiles for the embedded model."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._compiler = GrammarCompiler(folder, vocab_size=self._tokenizer.get_vocab_size(), eos_token_ids=(2,))

    def takes(self, grammar: common_pb2.Grammar | None, text: str) -> bool:
        """Whether `text` may begin an output."""
        assert grammar is not None
        state = self._compiler.compile(grammar)
        return all(state.commit(token) for token in self._tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def grammars(embedded_folder: Path) -> Grammars:
    return Grammars(embedded_folder)


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
        assert grammars.takes(grammar, f'{before}{{"city": "Rome"')
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
