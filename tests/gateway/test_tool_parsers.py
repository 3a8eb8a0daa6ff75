"""Calls of tools in every format: whole, in any pieces, and what only looks like one."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.parts import CallArguments, CallBegin, Content, Part
from gateway.tool_parsers.formats import FORCED, HERMES, ToolFormat, tool_format
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


def form_of(name: str) -> ToolFormat:
    """A format by the names of this file's examples."""
    return {"forced": FORCED, "mistral headed": tool_format("mistral", None)}.get(name) or tool_format(name, None)


def parse(form: ToolFormat, text: str, cuts: list[int]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, of text that comes cut at these places."""
    parser = form.make(SCHEMAS)
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


def test_the_template_tells_the_format() -> None:
    assert tool_format(None, "... [TOOL_CALLS] ...").name == "mistral"
    assert tool_format(None, None) is HERMES
    assert tool_format("Qwen25", "[TOOL_CALLS]") is HERMES
    with pytest.raises(StartupError, match="--tool-call-parser is 'magic'; it must be one of hermes"):
        tool_format("magic", None)
