"""Calls of tools in every format: whole, in any pieces, and what only looks like one."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.message_parts import CallArguments, CallBegin, Content, Part
from gateway.tool_parsers.formats import FORCED, HERMES, NAMES, ToolFormat, tool_format
from gateway.tool_parsers.scanner import is_whole
from gateway.tool_parsers.strict import Schemas
from outrider.args.gateway import TOOL_CALL_PARSERS
from outrider.errors import StartupError

SCHEMAS: dict[str, Any] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {"type": "object"},
}
ARGUMENTS = {"city": '東京 {"[\\', "days": 3}
TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)
XML_TEXT = '<parameter=city>\n東京 {"[\\\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
TWO_CALLS = {
    "hermes": f'Well.\n<tool_call>\n{{"name": "weather", "arguments": {TEXT}}}\n</tool_call>\n'
    '<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>',
    "llama3_json": f'{{"name": "weather", "parameters": {TEXT}}}; {{"name": "now"}}',
    "mistral": f'Well. [TOOL_CALLS] [{{"name": "weather", "arguments": {TEXT}}}, {{"name": "now", "arguments": {{}}}}]',
    "mistral headed": f"Well.[TOOL_CALLS]weather[CALL_ID]a1[ARGS]{TEXT}[TOOL_CALLS]now{{}}",
    "pythonic": "[weather(city='東京 {\"[\\\\', days=3), now()]",
    "qwen3_coder": f"Well.\n<tool_call>\n<function=weather>\n{XML_TEXT}</function>\n</tool_call>\n"
    "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "deepseekv3": "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    f"{TEXT}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseekv31": f"Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{TEXT}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "Well.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    f"{TEXT}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "forced": f'[{{"name": "weather", "arguments": {TEXT}}}, {{"name": "now", "arguments": {{}}}}]',
}
FREE_TEXT = [
    "", "Hi.", "  two  spaces \n", "{", "[", "<", "<tool", "<tool_call>", "<tool_call>x</tool_call>", '{"a": 1}',
    '<tool_call>{"name": "weather"', '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', "[1, 2]", "[f(]",
    "[rm()]", "[TOOL_CALLS]", "[TOOL_CALLS]rm{}", "<tool_call><function=rm></function></tool_call>",
    "<｜tool▁calls▁begin｜>what?", "a [b] {c} <d> ; e, f", "[weather(*x)]", "[now(1)]", '[{"name": "rm"}]',
]  # fmt: skip

# What texts are put together from to be cut anywhere: right, wrong and half.
PIECES = [
    "x", "word ", " ", "\n", "{", "}", "[", "]", '"', ",", "; ", "<", "null", "5", "```", "'", "(", ")", '{"name": ',
    '"weather"', '"rm"', '5, "name": "now"', ', "arguments": ', '{"a": 1', '{"city": "\\ud83d"}', '{"name": "now"}',
    '{"name": "weather", "arguments": {"days": 1}}', '{"name": "rm", "arguments": {}}', '{"name": 5}',
    '{"name": "\\u"}', '{"name": "weather", "arguments": {"a": 1]', '{"parameters": {"a": 2}, "name": "now"}',
    '{"parameters": 5, "name": "n', '{"name": "weather", "arguments": "{\\"city\\": \\"\\ud83d\\"}"}',
]  # fmt: skip
TAGS = ["<tool_call>", "</tool_call>", "<tool_call>\n", "\n</tool_call>\n", "<tool_", "call>", "</tool_"]
LISTED = ["[TOOL_CALLS]", "[TOOL_CALLS][", "[TOOL_", "CALLS]", '[TOOL_CALLS] [{"name": "now"}, ']
HEADED = [
    "[TOOL_CALLS]", "[TOOL_CALLS]weather{}", "[TOOL_CALLS]rm{}", "[TOOL_", "CALLS]", "now{", "[ARGS]", "[CALL_ID]a1",
]  # fmt: skip
DEEPSEEK = [
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁call",
    "s▁begin｜>", "weather<｜tool▁sep｜>", "<｜tool▁call▁begin｜>rm<｜tool▁sep｜>{}",
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}", "function<｜tool▁sep｜>now\n```json\n{}",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{",
]  # fmt: skip
KIMI = [
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>", "now",
    "<|tool_call_argument_begin|>", "<|tool_call", "s_section_begin|>", "functions.weather:0", "functions.rm:1",
    "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}",
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.rm:0<|tool_call_argument_begin|>{",
]  # fmt: skip
XML = [
    "<function=now>", "<function=weather>", "<function=rm>", "<function=", ">", "</function>", "</", "</parameter>",
    "<parameter=days>3</parameter>", "<parameter=city>\n", '<parameter=a>"\\ud83d"</parameter>', "<parameter=", "a>",
    "<tool_call><function=weather>", "</function>\n</tool_call>",
]  # fmt: skip
PYTHONIC = [
    "[weather(", "weather(city='x', days=3)", "now()", "rm()", "city=", "'\\ud83d'", "'\\ud83d\\ude00'", "{{'a': 1}}",
    "{'a': [1, true, None]}", "-", "b'x'", "1j", "f'{x}'", "1e999", "*",
]  # fmt: skip
# For each format: what its texts may begin with, since some take calls only there, and its own pieces.
MIXED: dict[str, tuple[list[str], list[str]]] = {
    "hermes": (["", "Well. "], TAGS),
    "llama3_json": (["", "<|python_tag|>", "<|python", '{"name": "now"}'], []),
    "mistral": (["[TOOL_CALLS] [", "Well. "], LISTED),
    "mistral headed": (["[TOOL_CALLS]now{}", "Well. "], HEADED),
    "pythonic": (["[", ""], PYTHONIC),
    "qwen3_coder": (["<tool_call><function=now>", "Well. "], TAGS + XML),
    "deepseekv3": (["<｜tool▁calls▁begin｜>", "Well. "], DEEPSEEK),
    "deepseekv31": (["<｜tool▁calls▁begin｜>", "Well. "], DEEPSEEK),
    "kimi_k2": (["<|tool_calls_section_begin|>", "Well. "], KIMI),
    "forced": (["[", ""], []),
}
EVERYWHERE = list(range(10**4))  # cuts that leave single characters


def form_of(name: str) -> ToolFormat:
    """A format by the names of this file's examples."""
    return {"forced": FORCED, "mistral headed": tool_format("mistral", None)}.get(name) or tool_format(name, None)


def parse(
    form: ToolFormat, text: str, cuts: list[int], schemas: Schemas = SCHEMAS
) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, of text that comes cut at these places."""
    parser = form.make(schemas)
    parts: list[Part] = []
    places = sorted({0, *(cut % (len(text) + 1) for cut in cuts), len(text)})
    for start, end in pairwise(places):
        parts += parser.push(text[start:end])
    parts += parser.finish()
    content = "".join(part.text for part in parts if isinstance(part, Content))
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallBegin):
            assert part.index == len(calls)
            calls.append((part.name, ""))
        elif isinstance(part, CallArguments):
            name, arguments = calls[part.index]
            calls[part.index] = (name, arguments + part.text)
    return content, calls


@pytest.mark.parametrize("name", list(TWO_CALLS))
@settings(max_examples=30)
@given(cuts=st.lists(st.integers(0, 10**6), max_size=8) | st.just(list(range(1000))))
def test_two_calls_in_any_pieces(name: str, cuts: list[int]) -> None:
    content, calls = parse(form_of(name), TWO_CALLS[name], cuts)
    assert content == ("Well." if TWO_CALLS[name].startswith("Well.") else "")
    assert [(function, json.loads(arguments)) for function, arguments in calls] == [("weather", ARGUMENTS), ("now", {})]


@pytest.mark.parametrize("name", list(TWO_CALLS))
@pytest.mark.parametrize("text", FREE_TEXT)
@pytest.mark.parametrize("cuts", [[], list(range(100))])
def test_what_is_no_call_stays_text(name: str, text: str, cuts: list[int]) -> None:
    content, calls = parse(form_of(name), text, cuts)
    if calls:  # one that was cut
        assert (name, text, calls) == ("hermes", '<tool_call>{"name": "weather"', [("weather", "")])
    elif name == "forced" and text in ("{", "["):  # the beginning of a call
        assert content == ""
    else:
        assert content.strip() == text.strip()


@pytest.mark.parametrize("name", list(TWO_CALLS))
@settings(max_examples=50)
@given(text=st.text("[]{}<>\"'\\:, abnow/=()|_\n", max_size=40), cuts=st.lists(st.integers(0, 40), max_size=5))
def test_nothing_breaks_a_parser(name: str, text: str, cuts: list[int]) -> None:
    content, calls = parse(form_of(name), text, cuts)
    assert {function for function, _ in calls} <= SCHEMAS.keys()
    assert len(content.strip()) <= len(text)
    assert (content, calls) == parse(form_of(name), text, [])


def test_arguments_come_as_they_are_written() -> None:
    parser = HERMES.make(SCHEMAS)
    begin = '<tool_call>{"name": "weather", "arguments": {"city": "Rome'
    assert list(parser.push(begin)) == [CallBegin(0, "weather"), CallArguments(0, '{"city": "Rome')]
    assert list(parser.push('"')) == [CallArguments(0, '"')]
    assert list(parser.push("}}")) == [CallArguments(0, "}")]
    assert list(parser.push("</tool_call>\n")) == []
    assert list(parser.finish()) == []


def test_arguments_as_a_string_of_json() -> None:
    text = '<tool_call>{"name": "weather", "id": [1, {"x": "}"}], "arguments": "{\\"days\\": 2}"}</tool_call>'
    assert parse(HERMES, text, []) == ("", [("weather", '{"days": 2}')])


def test_text_goes_on_after_a_call() -> None:
    text = 'a <tool_call>{"name": "now"}</tool_call> b <tool_call>{"name": "now"}</tool_call>'
    assert parse(HERMES, text, list(range(99))) == ("ab ".rstrip() + "", [("now", "{}"), ("now", "{}")])


def test_names_are_those_that_the_flag_takes() -> None:
    assert NAMES == TOOL_CALL_PARSERS


def test_the_template_tells_the_format() -> None:
    assert tool_format(None, "... [TOOL_CALLS] ...").name == "mistral"
    assert tool_format(None, None) is HERMES
    assert tool_format("Qwen25", "[TOOL_CALLS]") is HERMES
    with pytest.raises(StartupError, match="--tool-call-parser is 'magic'; it must be one of hermes"):
        tool_format("magic", None)


@st.composite
def mixed(draw: st.DrawFn, name: str) -> str:
    """Text in which calls of a format begin, go wrong and end anywhere."""
    beginnings, own = MIXED[name]
    pieces = st.sampled_from(own or PIECES) | st.sampled_from(PIECES)
    return draw(st.sampled_from(beginnings)) + "".join(draw(st.lists(pieces, max_size=14)))


@pytest.mark.parametrize("name", list(MIXED))
@settings(max_examples=200)
@given(data=st.data(), cuts=st.lists(st.integers(0, 200), max_size=8))
def test_what_is_found_does_not_depend_on_the_pieces(name: str, data: st.DataObject, cuts: list[int]) -> None:
    text = data.draw(mixed(name))
    found = parse(form_of(name), text, [])
    assert found == parse(form_of(name), text, cuts)
    assert found == parse(form_of(name), text, EVERYWHERE)
    msgspec.json.encode(found)  # as it goes out


# For each format a call, and the marks that may come after it.
_HERMES_MARKS = ("</tool_call>", "\n<tool_call>", "</tool_call>\n<tool_call>\n")
_DEEPSEEK_MARKS = ("<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>")
MARKS_AFTER = {
    "hermes": ('<tool_call>\n{"name": "now", "arguments": {}}\n', _HERMES_MARKS),
    "llama3_json": ('{"name": "now", "parameters": {}}', ("; ",)),
    "mistral": ('[TOOL_CALLS] [{"name": "now", "arguments": {}}', (", ", "]", "] [TOOL_CALLS] [")),
    "mistral headed": ("[TOOL_CALLS]now{}", ("[TOOL_CALLS]",)),
    "qwen3_coder": ("<tool_call>\n<function=now>\n</function>\n", (*_HERMES_MARKS, "<function=", "</function>")),
    "deepseekv3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n",
        tuple(f"```{mark}" for mark in _DEEPSEEK_MARKS),
    ),
    "deepseekv31": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}", _DEEPSEEK_MARKS),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}",
        ("<|tool_call_end|><|tool_call_begin|>", "<|tool_call_end|><|tool_calls_section_end|>"),
    ),
    "forced": ('[{"name": "now", "arguments": {}}', (", ", "]")),
    "pythonic": ("[now()]", ("\n",)),
}


@pytest.mark.parametrize("name", list(TWO_CALLS))
@pytest.mark.parametrize("cuts", [[], EVERYWHERE])
def test_an_answer_that_is_cut_in_a_mark_after_a_call(name: str, cuts: list[int]) -> None:
    call, marks = MARKS_AFTER[name]
    for mark in marks:
        for size in range(len(mark) + 1):
            assert parse(form_of(name), call + mark[:size], cuts) == ("", [("now", "{}")]), mark[:size]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_half_a_mark_after_text_is_text(name: str) -> None:
    text = f"{MARKS_AFTER[name][0]}</tool_call> so <tool_"
    content, calls = parse(form_of(name), text, [])
    assert (content.strip(), calls) == ("so <tool_", [("now", "{}")])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(
            (name, text)
            for name in ("hermes", "qwen3_coder", "mistral", "llama3_json")
            for text in ("so\n", " \n", "a\n\n  b \t")
        ),
        ("hermes", "so:\n\n<tool_call>\nhello\n</tool_call>\n"),
        ("hermes", 'so: <tool_call>\n <tool_call>{"name": "nope"} '),
        ("hermes", 'so:\n<tool_call>{"na'),
        ("qwen3_coder", "so:\n\n<tool_call>\nhello\n</tool_call>\n"),
        ("qwen3_coder", "so:\n\n<tool_call>\n<function=nope>\n "),
        ("mistral", 'so:\n\n[TOOL_CALLS] [{"name": "nope"}] '),
        ("mistral", "so:\n[TOOL_CALLS] "),
        ("llama3_json", "\n<|python_tag|>import os"),
    ],
)
@pytest.mark.parametrize("cuts", [[], EVERYWHERE])
def test_where_no_call_is_all_is_text_as_it_came(name: str, text: str, cuts: list[int]) -> None:
    assert parse(form_of(name), text, cuts) == (text, [])


NO_CALL = '<tool_call>\n{"name": "nope", "arguments": {}}\n'
AFTER_NO_CALL = {
    "hermes, not offered": (
        "hermes", f'{NO_CALL}</tool_call>\n<tool_call>\n{{"name": "weather", "arguments": {{}}}}\n</tool_call>',
        f"{NO_CALL}</tool_call>", [("weather", "{}")],
    ),
    "hermes, no JSON": (
        "hermes", '<tool_call>{"name" <tool_call>{"name": "now"}</tool_call>',
        '<tool_call>{"name" ', [("now", "{}")],
    ),
    "hermes, a name that is none": (
        "hermes", '<tool_call>{"name": 5, "x": 1} <tool_call>{"name": "now"}</tool_call>',
        '<tool_call>{"name": 5, "x": 1}', [("now", "{}")],
    ),
    "hermes, told already": (
        "hermes", '<tool_call>{"name": "weather", "arguments": {"a": 1], "b": 2}} <tool_call>{"name": "now"}',
        '], "b": 2}}', [("weather", '{"a": 1'), ("now", "{}")],
    ),
    "mistral, a second list": (
        "mistral", '[TOOL_CALLS][{"name": "now"}] [TOOL_CALLS][{"name": "weather"}]',
        "", [("now", "{}"), ("weather", "{}")],
    ),
    "headed, told already": (
        "mistral", "[TOOL_CALLS]weather{]} [TOOL_CALLS]now{}", "]}", [("weather", "{"), ("now", "{}")],
    ),
    "kimi, a second that is not offered": (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_call_begin|>rm<|tool_call_argument_begin|>{}",
        "<|tool_call_begin|>rm<|tool_call_argument_begin|>{}", [("now", "{}")],
    ),
    "hermes, a second that is cut": (
        "hermes", '<tool_call>{"name": "now"} {"na', '{"na', [("now", "{}")],
    ),
    "xml, not offered": (
        "qwen3_coder",
        "<tool_call>\n<function=rm>\n</function></tool_call>\n<tool_call><function=now></function></tool_call>",
        "<tool_call>\n<function=rm>\n</function></tool_call>", [("now", "{}")],
    ),
    "xml, words": (
        "qwen3_coder", "<tool_call> or <tool_call><function=now></function></tool_call>",
        "<tool_call> or", [("now", "{}")],
    ),
    "xml, words after a call": (
        "qwen3_coder", "<tool_call><function=now></function> so <tool_call><function=now></tool_call>",
        "so", [("now", "{}"), ("now", "{}")],
    ),
    "xml, nothing": ("qwen3_coder", "<tool_call>\n</tool_call> x", "<tool_call>\n</tool_call> x", []),
}  # fmt: skip


@pytest.mark.parametrize("case", list(AFTER_NO_CALL))
@pytest.mark.parametrize("cuts", [[], [20], EVERYWHERE])
def test_calls_are_found_after_what_is_none(case: str, cuts: list[int]) -> None:
    name, text, content, calls = AFTER_NO_CALL[case]
    assert parse(form_of(name), text, cuts) == (content, calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("mistral", f"[TOOL_CALLS]now{' ' * spaces}{{}}") for spaces in (295, 296, 297, 298, 400)),
        ("hermes", f'<tool_call>{{{" " * 300_000}"name": "now"}}'),
        ("qwen3_coder", f"<tool_call><function={'x' * 300_000}>"),
        ("qwen3_coder", f"<tool_call><function=now><parameter=a>{'x' * 300_000}</parameter></function>"),
        ("pythonic", f"[now(){' ' * 70_000}]"),
    ],
)
def test_limits_do_not_depend_on_the_pieces(name: str, text: str) -> None:
    found = parse(form_of(name), text, [])
    assert found == parse(form_of(name), text, list(range(0, len(text), 1 if len(text) < 1000 else 997)))


@pytest.mark.parametrize(
    ("name", "text", "city"),
    [
        ("pythonic", '[weather(city="Hi \\ud83d\\ude00")]', "Hi 😀"),
        ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"\\ud83d\\ude00\\"}"}', "😀"),
        ("qwen3_coder", '<tool_call><function=weather><parameter=city>"\\ud83d\\ude00"</parameter></function>', "😀"),
    ],
)
def test_halves_of_characters(name: str, text: str, city: str) -> None:
    """JSON escapes have characters beyond U+FFFF in two halves; a half alone has no bytes in UTF-8."""
    form, schemas = form_of(name), {"weather": {"type": "object"}}
    _, ((_, whole),) = parse(form, text, [], schemas)
    assert city in whole
    _, ((_, half),) = parse(form, text.replace("\\ude00", ""), [], schemas)
    assert json.loads(msgspec.json.decode(msgspec.json.encode(half))) == {"city": city.replace("😀", "\ud83d")}


def test_sets_are_no_values() -> None:
    text = '[weather(city={{"a": 1}})]'
    assert parse(form_of("pythonic"), text, []) == (text, [])


@pytest.mark.parametrize("properties", [[], None, {"a": True}, {"a": {"type": [{}]}}, {"a": {"$ref": "#/nowhere"}}])
def test_a_schema_of_any_shape(properties: Any) -> None:
    text = "<tool_call><function=now><parameter=a>1</parameter></function></tool_call>"
    assert parse(form_of("qwen3_coder"), text, [], {"now": {"properties": properties}}) == ("", [("now", '{"a": 1}')])


TEXT_OR_NULL: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
PARAMETERS: list[tuple[dict[str, Any], dict[str, str], dict[str, Any]]] = [
    ({"type": "string"}, {"12345": "12345", "true": "true", "None": "None", "null": "null"}, {}),
    (TEXT_OR_NULL, {"12345": "12345", "True": "True"}, {"null": None, "None": None}),
    ({"type": ["string", "null"]}, {"12345": "12345"}, {"null": None, "None": None}),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, {"12345": "12345"}, {}),
    ({"enum": ["1", "2"]}, {"1": "1"}, {}),
    ({"const": "1"}, {"1": "1"}, {}),
    ({"enum": [1, None]}, {}, {"1": 1, "None": None}),
    ({"$ref": "#/$defs/Zip~1Code"}, {"12345": "12345"}, {}),
    ({"allOf": [{"$ref": "#/$defs/Either"}], "description": "x"}, {"12345": "12345"}, {"None": None}),
    ({"$ref": "#/$defs/Circle"}, {"12345": "12345"}, {"null": None}),
    ({"type": "boolean"}, {"maybe": "maybe"}, {"True": True, "False": False, "true": True, "FALSE": False}),
    ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, {}, {"True": True, "None": None}),
    ({"type": "integer"}, {"None": "None", "True": "True"}, {"3": 3}),
    ({"anyOf": [{"type": "array"}, {"type": "null"}]}, {}, {"[1]": [1], "None": None}),
    ({}, {"Rome": "Rome", "None": "None"}, {"3": 3, "null": None}),
]
DEFINITIONS: dict[str, Any] = {
    "Zip/Code": {"type": "string"}, "Either": {"type": ["string", "null"]},
    "Circle": {"anyOf": [{"$ref": "#/$defs/Circle"}, {"$ref": "#/$defs/Either"}]},
}  # fmt: skip


@pytest.mark.parametrize(("schema", "texts", "others"), PARAMETERS)
@pytest.mark.parametrize("place", ["properties", "additionalProperties", "by reference"])
def test_xml_values_are_what_the_schema_says(
    schema: dict[str, Any], texts: dict[str, str], others: dict[str, Any], place: str
) -> None:
    parameters: dict[str, Any] = {"$defs": DEFINITIONS, "properties": {"a": schema}}
    if place == "additionalProperties":
        parameters = {"$defs": DEFINITIONS, "additionalProperties": schema}
    elif place == "by reference":
        parameters = {"$ref": "#/$defs/Whole", "$defs": {**DEFINITIONS, "Whole": {"properties": {"a": schema}}}}
    for written, value in {**texts, **others}.items():
        text = f"<tool_call><function=now><parameter=a>\n{written}\n</parameter></function></tool_call>"
        _, ((_, arguments),) = parse(form_of("qwen3_coder"), text, [], {"now": parameters})
        assert json.loads(arguments) == {"a": value}, written


def test_references_without_end() -> None:
    chain: dict[str, Any] = {str(index): {"$ref": f"#/$defs/{index + 1}"} for index in range(10_000)}
    parameters = {"$defs": chain, "properties": {"a": {"$ref": "#/$defs/0"}}}
    text = "<tool_call><function=now><parameter=a>1</parameter></function></tool_call>"
    assert parse(form_of("qwen3_coder"), text, [], {"now": parameters}) == ("", [("now", '{"a": 1}')])


@pytest.mark.parametrize("cuts", [[], EVERYWHERE])
def test_a_forced_call_that_is_cut_is_no_text(cuts: list[int]) -> None:
    text = TWO_CALLS["forced"]
    for size in range(len(text)):
        content, calls = parse(FORCED, text[:size], cuts)
        assert content == "", text[:size]
        assert [function for function, _ in calls] == ["weather", "now"][: len(calls)]


@pytest.mark.parametrize(
    ("arguments", "whole"),
    [
        ("{}", True), ('{"a": {"b": "}"}}', True), ("5", True), ('"x"', True), ("", False), ("{", False),
        ('{"a": {"b": 1}', False), ('{"a": "}', False), ("[1}", False), ("[1]]", True),
    ],
)  # fmt: skip
def test_whole_arguments(arguments: str, whole: bool) -> None:
    assert is_whole(arguments) == whole


def test_arguments_in_an_empty_string_are_none() -> None:
    assert parse(HERMES, '<tool_call>{"name": "now", "arguments": ""}</tool_call>', []) == ("", [("now", "{}")])


LONG = f"mcp__{'a' * 59}__{'b' * 64}"  # a function's name and its namespace's
BY_HEADER = {
    "mistral": "[TOOL_CALLS]%s[ARGS]{}",
    "deepseekv3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n{}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.%s:0"
    "<|tool_call_argument_begin|>{}<|tool_call_end|>",
}  # fmt: skip


@pytest.mark.parametrize("name", list(BY_HEADER))
def test_a_header_may_name_a_function_with_its_namespace(name: str) -> None:
    assert parse(form_of(name), BY_HEADER[name] % LONG, [], {LONG: {}}) == ("", [(LONG, "{}")])


# What models write as arguments, and what is told.
AS_ARGUMENTS = {
    "ls": "{}", "5": "{}", "true": "{}", "null": "{}", "[1, 2]": "{}", '"rm.ru"': "{}", '"[1]"': "{}", '"5"': "{}",
    '""': "{}", '"{"': "{}", '"{\\"a\\": NaN}"': "{}", '"a\nb"': "{}", '"\\u"': "{}", "[1}": "{}", "": "{}",
    f'"{"[" * 10**5}"': "{}", '"{\\"a\\": 1}"': '{"a": 1}', '{"a": 1}': '{"a": 1}',
    '{"a": 1}, "parameters": {"b": 2}': '{"a": 1}', '"x", "parameters": {"b": 2}': "{}",
    '{"a": 1}, "arguments": 5': '{"a": 1}', '{a: 1}': '{a: 1}',
}  # fmt: skip
WITH_NAMES = {
    "hermes": "<tool_call>\n%s\n</tool_call>", "llama3_json": "%s", "mistral": "[TOOL_CALLS] [%s]", "forced": "[%s]",
}  # fmt: skip


@pytest.mark.parametrize("name", list(WITH_NAMES))
@pytest.mark.parametrize("written", list(AS_ARGUMENTS))
@pytest.mark.parametrize("cuts", [[], EVERYWHERE])
def test_what_stands_in_place_of_arguments(name: str, written: str, cuts: list[int]) -> None:
    text = WITH_NAMES[name] % f'{{"name": "now", "arguments": {written}}}'
    content, calls = parse(form_of(name), text, cuts)
    assert calls == [("now", AS_ARGUMENTS[written])]
    assert not content or written in ("", "[1}")  # no values: text goes on where they break off


@pytest.mark.parametrize("text", ['{"name": "now" "arguments": {}}', '{"name": "now", 5}', '{"name": "now"]'])
@pytest.mark.parametrize("cuts", [[], EVERYWHERE])
def test_a_call_that_goes_wrong_before_its_arguments_has_none(text: str, cuts: list[int]) -> None:
    _, calls = parse(HERMES, f"<tool_call>{text}</tool_call>", cuts)
    assert calls == [("now", "{}")]


@pytest.mark.parametrize("name", list(WITH_NAMES))
@pytest.mark.parametrize("strays", ["}", "}}", " }\n"])
@pytest.mark.parametrize("cuts", [[], EVERYWHERE])
def test_braces_too_many_after_a_call(name: str, strays: str, cuts: list[int]) -> None:
    text = WITH_NAMES[name] % ('{"name": "now", "arguments": {}}' + strays)
    assert parse(form_of(name), text, cuts) == ("", [("now", "{}")])


@pytest.mark.parametrize("name", list(WITH_NAMES))
@pytest.mark.parametrize("cuts", [[], EVERYWHERE])
def test_a_brace_too_few_ends_a_call_all_the_same(name: str, cuts: list[int]) -> None:
    text = WITH_NAMES[name] % '{"name": "now", "arguments": {"a": 1}'
    assert parse(form_of(name), text, cuts) == ("", [("now", '{"a": 1}')])


@pytest.mark.parametrize("cuts", [[], EVERYWHERE])
def test_what_follows_a_brace_too_few(cuts: list[int]) -> None:
    call, other = '<tool_call>{"name": "now", "arguments": {}', '<tool_call>{"name": "now"}</tool_call>'
    assert parse(HERMES, f"{call}</tool_call>{other}", cuts) == ("", [("now", "{}"), ("now", "{}")])
    assert parse(HERMES, f"{call} and so on", cuts) == ("and so on", [("now", "{}")])


@pytest.mark.parametrize("text", ["} else {", "}} x} y", "}a"])
@pytest.mark.parametrize("cuts", [[], EVERYWHERE])
def test_text_after_a_call_may_begin_with_braces(text: str, cuts: list[int]) -> None:
    whole = f'<tool_call>{{"name": "now"}}</tool_call>\n{text}'
    assert parse(HERMES, whole, cuts) == (text, [("now", "{}")])


def test_a_brace_before_a_call_is_text() -> None:
    text = '<tool_call>{"name": "now"}</tool_call><tool_call>} '
    for cuts in ([], EVERYWHERE):
        assert parse(HERMES, text, cuts) == ("<tool_call>} ", [("now", "{}")])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["name", "arguments", "parameters", "x"])


@pytest.mark.parametrize("name", list(WITH_NAMES))
@settings(max_examples=100)
@given(
    pairs=st.lists(st.tuples(KEYS, VALUES | VALUES.map(json.dumps))),
    at=st.integers(0, 4), strays=st.text("} ", max_size=3), cuts=st.lists(st.integers(0, 200), max_size=8),
)  # fmt: skip
def test_arguments_are_an_object_whatever_is_written(
    name: str, pairs: list[tuple[str, Any]], at: int, strays: str, cuts: list[int]
) -> None:
    pairs.insert(at, ("name", "now"))
    call = ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in pairs)
    text = WITH_NAMES[name] % f"{{{call}}}{strays}"
    found = parse(form_of(name), text, [])
    assert found == parse(form_of(name), text, cuts) == parse(form_of(name), text, EVERYWHERE)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in found[1])


def test_a_name_of_many_lists() -> None:
    text = '<tool_call>{"name": ' + "[" * 10**5 + "]" * 10**5 + "}"
    assert parse(HERMES, text, []) == (text, [])
