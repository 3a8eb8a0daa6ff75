"""Decoding bodies: the errors' fields, and where the work is done."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import msgspec
import pytest

from gateway import body as reading
from gateway.body import BodyDecoder
from gateway.errors import HttpError, failure
from gateway.offload import INLINE_BYTES, offload
from gateway.responses_schemas import ResponsesRequest
from gateway.schemas import ChatCompletionRequest
from outrider.errors import InvalidArgument

SECRET = "hunter2"
ROLES = "one of assistant, developer, system, tool, user."
MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": SECRET},
        {"messages": [{"role": {SECRET: 1}}]},
        {"messages": [], SECRET: 1},
        {"messages": [{"role": "user", "content": [{"type": SECRET}]}], "stop": [SECRET, 5]},
        {"messages": [], "logit_bias": {SECRET: SECRET}},
        {"messages": [], "temperature": [SECRET]},
    ],
)
def test_values_are_never_repeated(body: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        BodyDecoder(strict_fields=False).decode(json.dumps(body).encode(), ChatCompletionRequest)
    assert SECRET.encode() not in failure(refused.value).body


@pytest.mark.parametrize(
    ("body", "kind", "told"),
    [
        (
            {"messages": [{"role": "usr", "content": "x"}]}, ChatCompletionRequest,
            f"Invalid value for 'messages[0].role': \"usr\"; it must be {ROLES}",
        ),
        ({"input": [{"role": "usr", "content": "x"}]}, ResponsesRequest, ROLES),
        ({"messages": MESSAGES, "tool_choice": "maybe"}, ChatCompletionRequest, "one of auto, none, required."),
    ],
)  # fmt: skip
def test_a_word_that_is_none_of_a_few_is_answered_with_them(
    body: dict[str, object], kind: type[msgspec.Struct], told: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        BodyDecoder(strict_fields=False).decode(json.dumps(body).encode(), kind)
    assert refused.value.message.endswith(told)


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b'{"messages": [],\n "n": }', ": line 2, column 7."), (b'{"messages": "\xff"}', ": byte 15."),
        (b"", ": line 1, column 1."), (b'{"n": NaN}', "repeated keys."), (b'{"n": 1, "n": 1}', "repeated keys."),
    ],
)  # fmt: skip
def test_where_json_is_wrong_is_told(body: bytes, where: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        BodyDecoder(strict_fields=False).decode(body, ChatCompletionRequest)
    assert refused.value.message.endswith(where)


@pytest.mark.parametrize("values", [b"9," * 2**20, b"[]," * 2**17, b'{"a":[]},' * 2**16, b'"a,a",' * 2**20])
def test_more_values_than_are_parsed(values: bytes) -> None:
    with pytest.raises(HttpError) as refused:
        BodyDecoder(strict_fields=False).decode(b'{"messages":[' + values + b"9]", ChatCompletionRequest)
    assert refused.value.http_status == 413  # though it is no JSON at all, which nobody has found out


@pytest.mark.parametrize("text", [",[{" * 2**18, '\\\\,[{\\"' * 2**18])
def test_what_a_text_holds_are_no_values(text: str) -> None:
    body = b'{"messages":[{"role":"user","content":"%b"}]}' % text.encode()
    (message,) = BodyDecoder(strict_fields=False).decode(body, ChatCompletionRequest).messages
    assert message.content == json.loads(f'"{text}"')
    with pytest.raises(InvalidArgument):  # without its end, and every quote in it may begin another
        BodyDecoder(strict_fields=False).decode(body.removesuffix(b'"}]}'), ChatCompletionRequest)


def test_strings_that_no_comma_parts_are_left_to_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def counting(text: bytes, start: int, end: int) -> int:
        counted.append(end - start)
        return cost(text, start, end)

    cost = reading._cost
    monkeypatch.setattr(reading, "_cost", counting)
    with pytest.raises(InvalidArgument):
        BodyDecoder(strict_fields=False).decode(b'"' + b"," * 2**21 + b'"' + b'""' * 2**20, ChatCompletionRequest)
    assert len(counted) < 10


def test_unexpected_errors_tell_nothing() -> None:
    failed = failure(ValueError(SECRET))
    assert failed.status == 500
    assert SECRET.encode() not in failed.body


def test_names_of_unknown_fields_can_always_be_sent() -> None:
    body = b'{"messages":[{"role":"user","content":"x"}],"\\ud800\\udead":1}'
    with pytest.raises(InvalidArgument) as refused:
        BodyDecoder(strict_fields=True).decode(body, ChatCompletionRequest)
    failure(refused.value)
    BodyDecoder(strict_fields=False)


@pytest.mark.parametrize(
    ("page", "sentence"),
    [("errors.md", r"for those of (.*?)\. Within all other objects"), ("http.md", r"also within\s(.*?), are ignored")],
)
def test_guides_name_the_objects_whose_fields_are_looked_at(page: str, sentence: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    (objects,) = re.findall(sentence, text, re.DOTALL)
    assert re.findall(r"`(\w+)`", objects) == list(reading._OPTIONS)


@pytest.mark.asyncio
async def test_large_work_leaves_the_event_loop() -> None:
    here = threading.current_thread()
    assert await offload(INLINE_BYTES, threading.current_thread) is here
    assert await offload(INLINE_BYTES + 1, threading.current_thread) is not here
