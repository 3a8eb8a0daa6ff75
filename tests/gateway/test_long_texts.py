"""Parsers take what is new in a text, and not again what they hold, however long that is."""

from __future__ import annotations

from functools import partial

import pytest

from gateway.message_parts import PartParser
from gateway.reasoning import ReasoningParser, reasoning_format
from gateway.responses_output import Transcript
from gateway.text_stream import Piece
from gateway.tool_parsers.formats import FORCED, tool_format
from tests.gateway.allocations import bytes_per_step

_NUM_PIECES, _MOST_BYTES = 10_000, 4096  # a copy of all that came so far is 20,000 bytes on average

BEGINNINGS = {
    "hermes": ["Well.", "<tool_call>", '<tool_call>{"name": "now"}', "<tool_call>{"],
    "llama3_json": ["", "Well.", '{"name": "now"}'],
    "mistral": ["", "Well.", "[TOOL_CALLS]", "[TOOL_CALLS][{"],
    "pythonic": ["", "Well.", "[now("],
    "qwen3_coder": ["", "Well.", "<tool_call>", "<tool_call><function=now>", "<tool_call><function=now></function>"],
    "deepseekv3": ["Well.", "<｜tool▁calls▁begin｜>"],
    "kimi_k2": ["Well.", "<|tool_calls_section_begin|>"],
}
ARGUMENTS = [
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "'),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{'),
    ("hermes", '<tool_call>{"name": "now", "x": "'),
    ("hermes", '<tool_call>{"arguments": {"a": "'),
    ("llama3_json", '{"parameters": {"a": "'),
    ("mistral", '[TOOL_CALLS][{"arguments": {"a": "'),
    ("mistral", '[TOOL_CALLS]now{"a": "'),
    ("pythonic", "[now(a='"),
    ("qwen3_coder", "<tool_call><function=now><parameter=a>"),
    ("qwen3_coder", "<tool_call><function=now><parameter="),
    ("qwen3_coder", "<tool_call><function="),
    ("forced", '[{"arguments": {"a": "'),
]


def check(parser: PartParser, beginning: str, piece: str) -> None:
    """A push costs what its piece costs."""
    list(parser.push(beginning))
    assert bytes_per_step([lambda: list(parser.push(piece))] * _NUM_PIECES) < _MOST_BYTES


@pytest.mark.parametrize(("name", "beginning"), [(name, text) for name in BEGINNINGS for text in BEGINNINGS[name]])
def test_white_space_without_end(name: str, beginning: str) -> None:
    check(tool_format(name, None).make({"now": {}}), beginning, " \n\n ")


@pytest.mark.parametrize(("name", "beginning"), ARGUMENTS)
def test_arguments_without_end(name: str, beginning: str) -> None:
    form = FORCED if name == "forced" else tool_format(name, None)
    check(form.make({"now": {}}), beginning, "abc ")


def test_parameters_without_end_in_a_response_with_logprobs() -> None:
    parser = tool_format("qwen3_coder", None).make({"now": {}})
    transcript = Transcript(lambda token: b"x", logprobs=True)

    def say(text: str) -> None:
        transcript.tokens([Piece(0, text, 0, 0, None, None)])
        for part in parser.push(text):
            list(transcript.add(part, "call"))

    say("<tool_call><function=now>")
    parameter = ("<parameter=", "a>", "1", "</parameter>")
    assert bytes_per_step([partial(say, text) for text in parameter * 1000]) < 2 * _MOST_BYTES


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("beginning", ["", "<think>", "<think>Why?", "<think>Why?</think>"])
def test_white_space_in_reasoning(beginning: str, inside: bool) -> None:
    form = reasoning_format("qwen3")
    assert form is not None
    check(ReasoningParser(form, None, inside=inside), beginning, " \n\n ")
