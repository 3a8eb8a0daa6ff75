"""Tools, forced calls and reasoning through the official client, in every way it has of asking."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from tokenizers import Tokenizer

from outrider.errors import InvalidArgument
from outrider.wire import unpack_ids
from tests.gateway import models
from tests.gateway.fakes import FakeVerify, RunningGateway, running

USER: Any = [{"role": "user", "content": "How is it in <|im_end|>Rome?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather", "description": "Tells the <|im_end|> weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}  # fmt: skip
NOW: Any = {"type": "function", "function": {"name": "now"}}
TWO_CALLS = (
    'Wait.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def shared(folder: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningGateway]:
    """A gateway with room for tools in words."""
    with started(folder, tokenizer, tmp_path_factory.mktemp("tools")) as gateway:
        yield gateway


def started(
    folder: Path, tokenizer: Tokenizer, sockets: Path, **args: Any
) -> contextlib.AbstractContextManager[RunningGateway]:
    """A gateway in front of one fake with a long context."""

    def fakes() -> list[FakeVerify]:
        return [FakeVerify(folder, vocab_size=tokenizer.get_vocab_size(), context_length=4096)]

    return running({"served_model_name": "small", **args}, fakes, sockets)


def say(gateway: RunningGateway, tokenizer: Tokenizer, text: str, *, end: bool = True) -> None:
    """Lets verify say `text`."""
    (verify,) = gateway.verify
    ids = [*tokenizer.encode(text, add_special_tokens=False).ids, *([verify.eos] if end else [])]
    verify.say = lambda request, choice: ids


def prompt_of(gateway: RunningGateway, tokenizer: Tokenizer) -> str:
    """What verify was asked to continue."""
    ids = unpack_ids(gateway.verify[0].requests[-1].prompt_tokens, field="").tolist()
    return tokenizer.decode(ids, skip_special_tokens=False)


def only_call(made: Any) -> Any:
    """The one call of an answer."""
    (call,) = made.choices[0].message.tool_calls
    assert call.type == "function"
    return call


def test_calls(client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer) -> None:
    say(gateway, tokenizer, TWO_CALLS)
    made = client.chat.completions.create(model="small", messages=USER, tools=[WEATHER, NOW])
    (choice,) = made.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Wait.")
    calls: Any = choice.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"city": "Rome"}), ("now", {}),
    ]  # fmt: skip
    assert len({call.id for call in calls}) == 2
    assert all(call.id.startswith("call_") and call.type == "function" for call in calls)
    prompt = prompt_of(gateway, tokenizer)
    assert '"name": "weather", "description": "Tells the <|im_end|> weather."' in prompt
    ids = unpack_ids(gateway.verify[0].requests[-1].prompt_tokens, field="").tolist()
    assert ids.count(2) == 2  # the template's own: neither the message's nor the description's is a control token


def test_one_call_where_they_are_not_to_be_parallel(
    client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer
) -> None:
    say(gateway, tokenizer, TWO_CALLS)
    made = client.chat.completions.create(model="small", messages=USER, tools=[WEATHER, NOW], parallel_tool_calls=False)
    assert only_call(made).function.name == "weather"


def test_calls_in_a_stream(client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer) -> None:
    say(gateway, tokenizer, TWO_CALLS)
    stream = client.chat.completions.create(model="small", messages=USER, tools=[WEATHER, NOW], stream=True)
    content, calls, reasons = "", dict[int, list[str]](), []
    for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasons.append(choice.finish_reason)
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            if call.index not in calls:
                assert (call.id, call.type) == (call.id or "none", "function")
                calls[call.index] = [call.function.name or "", ""]
            else:
                assert call.id is None
            calls[call.index][1] += call.function.arguments or ""
    assert content == "Wait."
    assert calls == {0: ["weather", '{"city": "Rome"}'], 1: ["now", "{}"]}
    assert reasons[-1] == "tool_calls"


def test_a_stream_that_begins_with_a_call_has_no_content(
    client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer
) -> None:
    say(gateway, tokenizer, TWO_CALLS.removeprefix("Wait."))
    stream = client.chat.completions.create(model="small", messages=USER, tools=[WEATHER, NOW], stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert [delta.content for delta in deltas] == [None] * len(deltas)


def test_a_result_goes_back(client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer) -> None:
    messages: Any = [
        *USER,
        {"role": "assistant", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]},
        {"role": "tool", "tool_call_id": "c", "content": "Fine."},
    ]  # fmt: skip
    client.chat.completions.create(model="small", messages=messages, tools=[WEATHER])
    assert prompt_of(gateway, tokenizer).endswith(
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nFine.\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": None, "reasoning_content": "Hm."},
        {"role": "assistant", "content": None, "refusal": ""},
        {"role": "tool", "tool_call_id": "c", "content": []},
    ],
)
def test_turns_that_say_nothing(gateway: RunningGateway, turn: dict[str, Any]) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}, turn, *USER]
    reply = httpx.post(f"{gateway.url}/v1/chat/completions", json={"messages": messages})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER], "tool_choice": "none"}])
def test_earlier_calls_stay_where_none_may_be_made(
    client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer, fields: Any
) -> None:
    messages: Any = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]},
        {"role": "tool", "tool_call_id": "c", "content": "Fine."},
    ]  # fmt: skip
    client.chat.completions.create(model="small", messages=messages, **fields)
    assert prompt_of(gateway, tokenizer) == (
        "<|im_start|>user\nHow is it in <|im_end|>Rome?<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nFine.\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


FORCED_CALL = '[{"name": "weather", "arguments": {"city": "Rome"}}]'


@pytest.mark.parametrize(
    ("said", "choice", "stop", "arguments", "reason"),
    [
        (FORCED_CALL, "required", "}", '{"city": "Rome"', "stop"),
        (FORCED_CALL, "required", "}]", '{"city": "Rome"}', "tool_calls"),
        (FORCED_CALL, "required", ":", None, "stop"),
        (TWO_CALLS, "auto", "Rome", '{"city": "', "stop"),
        (TWO_CALLS, "auto", "</tool_call>", '{"city": "Rome"}', "tool_calls"),
        (TWO_CALLS[:-15], "auto", "never", "{", "stop"),  # the model's own end, within the second call
    ],
)
def test_a_call_that_a_stop_string_cuts(
    client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer,
    said: str, choice: Any, stop: str, arguments: str | None, reason: str,
) -> None:  # fmt: skip
    say(gateway, tokenizer, said)
    asked: Any = {"model": "small", "messages": USER, "tools": [WEATHER, NOW], "tool_choice": choice, "stop": [stop]}
    (made,) = client.chat.completions.create(**asked).choices
    calls: Any = made.message.tool_calls or []
    assert [call.function.arguments for call in calls][-1:] == ([] if arguments is None else [arguments])
    assert (made.finish_reason, (made.message.content or "").rstrip()) == (
        reason,
        said.partition("\n")[0] * (choice == "auto"),
    )
    streamed = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert streamed[-1].finish_reason == reason


@pytest.mark.parametrize("num_tokens", range(1, 60))
def test_a_forced_call_that_is_cut_has_no_content(
    client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer, num_tokens: int
) -> None:
    say(gateway, tokenizer, '[{"name": "now", "arguments": {}}, {"name": "weather", "arguments": {"city": "Rome"}}]')
    asked: Any = {"model": "small", "messages": USER, "tools": [WEATHER, NOW], "tool_choice": "required",
                  "max_tokens": num_tokens}  # fmt: skip
    (choice,) = client.chat.completions.create(**asked).choices
    assert not choice.message.content
    if num_tokens % 10 == 1:
        assert not any(chunk.choices[0].delta.content for chunk in client.chat.completions.create(**asked, stream=True))


LOOSE: dict[str, Any] = {
    "properties": {
        "tags": {"type": "array", "items": {"type": "string", "format": "path"}, "uniqueItems": True},
        "format": {"type": "string"},
    }
}


@pytest.mark.parametrize("strict", [True, False, None])
def test_only_strict_tools_are_held_to_all_of_their_schema(
    client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer, strict: bool | None
) -> None:
    say(gateway, tokenizer, "{}")
    tool: Any = {"type": "function", "function": {"name": "tag", "parameters": LOOSE, "strict": strict}}
    choice: Any = {"type": "function", "function": {"name": "tag"}}
    client.chat.completions.create(model="small", messages=USER, tools=[tool], tool_choice=choice)
    held = json.loads(gateway.verify[0].requests[-1].sampling.grammar.json_schema)
    tags: Any = {"type": "array", "items": {"type": "string"}}
    properties = LOOSE["properties"] if strict else {"tags": tags, "format": {"type": "string"}}
    assert held == {"type": "object", "properties": properties, "additionalProperties": False}


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
@pytest.mark.parametrize("strict", [True, False])
def test_a_function_without_parameters_gets_none(
    client: openai.OpenAI,
    gateway: RunningGateway,
    tokenizer: Tokenizer,
    parameters: dict[str, Any] | None,
    strict: bool,
) -> None:
    say(gateway, tokenizer, "{}")
    function: dict[str, Any] = {"name": "now", "parameters": parameters, "strict": strict and not parameters}
    choice: Any = {"type": "function", "function": {"name": "now"}}
    tools: Any = [{"type": "function", "function": function}]
    client.chat.completions.create(model="small", messages=USER, tools=tools, tool_choice=choice)
    held = json.loads(gateway.verify[0].requests[-1].sampling.grammar.json_schema)
    assert held == {"type": "object", "properties": {}, "additionalProperties": False}


def test_a_named_call(client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer) -> None:
    say(gateway, tokenizer, '{"city": "Rome"}')
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    made = client.chat.completions.create(model="small", messages=USER, tools=[NOW, WEATHER], tool_choice=choice)
    call = only_call(made)
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Rome"}')
    assert (made.choices[0].message.content, made.choices[0].finish_reason) == (None, "stop")
    grammar = gateway.verify[0].requests[-1].sampling.grammar
    assert json.loads(grammar.json_schema) == {**WEATHER["function"]["parameters"], "additionalProperties": False}


@pytest.mark.parametrize("parallel", [True, False])
def test_a_required_call(client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer, parallel: bool) -> None:
    say(gateway, tokenizer, '[{"name": "now", "arguments": {}}]')
    made = client.chat.completions.create(
        model="small", messages=USER, tools=[NOW, WEATHER], tool_choice="required", parallel_tool_calls=parallel
    )
    call = only_call(made)
    assert (call.function.name, made.choices[0].finish_reason) == ("now", "tool_calls")
    schema = json.loads(gateway.verify[0].requests[-1].sampling.grammar.json_schema)
    assert (schema["minItems"], schema["maxItems"] == 1) == (1, not parallel)
    assert schema["$defs"]["weather"] == {**WEATHER["function"]["parameters"], "additionalProperties": False}


def test_allowed_and_no_tools(client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer) -> None:
    say(gateway, tokenizer, TWO_CALLS)
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
        {"type": "function", "function": {"name": "now"}}]}}  # fmt: skip
    made = client.chat.completions.create(model="small", messages=USER, tools=[WEATHER, NOW], tool_choice=choice)
    call = only_call(made)
    assert call.function.name == "now"
    made = client.chat.completions.create(model="small", messages=USER, tools=[WEATHER], tool_choice="none")
    assert (made.choices[0].message.content, made.choices[0].message.tool_calls) == (TWO_CALLS, None)
    assert "weather" not in prompt_of(gateway, tokenizer)


def test_strict_tools_are_held_to_their_schemas(
    client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer
) -> None:
    class Weather(BaseModel):
        city: str

    say(gateway, tokenizer, '<tool_call>\n{"name": "Weather", "arguments": {"city": "Rome"}}\n</tool_call>')
    tool = openai.pydantic_function_tool(Weather)
    made = client.chat.completions.parse(model="small", messages=USER, tools=[tool])
    call = only_call(made)
    assert call.function.parsed_arguments == Weather(city="Rome")
    assert gateway.verify[0].requests[-1].sampling.grammar.ebnf.startswith("%llguidance")


def test_parsed_content(client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer) -> None:
    class Answer(BaseModel):
        city: str
        days: int

    say(gateway, tokenizer, '{"city": "Rome", "days": 3}')
    made = client.chat.completions.parse(model="small", messages=USER, response_format=Answer)
    assert made.choices[0].message.parsed == Answer(city="Rome", days=3)
    with client.chat.completions.stream(model="small", messages=USER, response_format=Answer) as stream:
        stream.until_done()
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == Answer(city="Rome", days=3)


DEEP: dict[str, Any] = {"type": "object"}
for _ in range(40):
    DEEP = {"type": "object", "properties": {"x": DEEP}}


ROUNDED: dict[str, Any] = {"type": "object", "properties": {"user": {"const": 1234567890123456789}}}


VERY_DEEP: dict[str, Any] = {"type": "object"}
for _ in range(400):
    VERY_DEEP = {"type": "object", "properties": {"x": VERY_DEEP}}


def test_a_schema_that_would_be_too_deep_to_walk_is_refused(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": VERY_DEEP}}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="small", messages=USER, extra_body={"tools": tools})
    assert refused.value.code == "invalid_json_schema"


@pytest.mark.parametrize(
    "arguments", ['{"wei": 1000000000000000000000000}', '{"t": "\\ud83d"}', '{"t": "\\ud83d\\ude00"}']
)
def test_arguments_of_earlier_calls_are_anything(client: openai.OpenAI, arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": arguments}}
    messages: Any = [
        *USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "1"}
    ]  # fmt: skip
    assert client.chat.completions.create(model="small", messages=messages).choices


@pytest.mark.parametrize("arguments", ['{"x":NaN}', '{"x":1e999}', '{"x":1,"x":2}'])
@pytest.mark.parametrize("route", ["chat/completions", "responses"])
def test_arguments_that_are_no_json_go_back_as_they_were(
    gateway: RunningGateway, tokenizer: Tokenizer, route: str, arguments: str
) -> None:
    call = {"name": "now", "arguments": arguments}
    if route == "responses":
        made = {"type": "function_call", "call_id": "c", **call}
        fields: Any = {"input": [*USER, made, {"type": "function_call_output", "call_id": "c", "output": "1"}]}
    else:
        turn = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": call}]}
        fields = {"messages": [*USER, turn, {"role": "tool", "tool_call_id": "c", "content": "1"}]}
    reply = httpx.post(f"{gateway.url}/v1/{route}", json=fields)
    assert reply.status_code == 200, reply.text
    assert f"<tool_call>\n{json.dumps(call)}\n</tool_call>" in prompt_of(gateway, tokenizer)


def test_whole_numbers_of_any_size_reach_the_template(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"wei": {"type": "integer", "maximum": 2**256}}}
    tools = [{"type": "function", "function": {"name": "send", "parameters": schema}}]
    fields = {"tools": tools, "chat_template_kwargs": {"a": 10**20}}
    assert client.chat.completions.create(model="small", messages=USER, extra_body=fields).choices


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"tools": []}, "empty_array", "tools"),
        ({"tool_choice": "auto"}, "invalid_value", "tool_choice"),
        ({"tools": [NOW], "tool_choice": "always"}, "invalid_value", "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "invalid_value",
         "tool_choice.function.name"),
        ({"tools": [NOW], "tool_choice": {"type": "function"}}, "missing_required_parameter", "tool_choice.function"),
        ({"tools": [NOW, NOW]}, "invalid_value", "tools[1].function.name"),
        ({"tools": [{"type": "web_search"}]}, "invalid_value", "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "invalid_value", "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]}, "invalid_json_schema",
         "tools[0].function.parameters"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": DEEP}}},
         "invalid_json_schema", "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "x" * 70_000}}}},
         "invalid_json_schema", "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
         "invalid_type", "response_format.json_schema.strict"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": ROUNDED, "strict": True}}},
         "invalid_json_schema", "response_format.json_schema.schema"),
        ({"tools": [NOW, {"type": "function", "function": {"name": "f", "parameters": ROUNDED, "strict": True}}]},
         "invalid_json_schema", "tools[1].function.parameters"),
        ({"regex": "a+", "ebnf": "root ::= x"}, "invalid_value", "regex"),
        ({"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "json_object"}}, "invalid_value",
         "structured_outputs"),
        ({"response_format": {"type": "json_object", "schema": DEEP}}, "invalid_json_schema", "response_format.schema"),
        ({"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}}, "invalid_value",
         "response_format.schema"),
        ({"response_format": {"type": "text", "schema": {"type": "object"}}}, "invalid_value",
         "response_format.schema"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "invalid_value",
         "response_format.json_schema"),
        ({"structured_outputs": {"choice": ["a"], "regex": "a"}}, "invalid_value", "structured_outputs.choice"),
        ({"structured_outputs": {"choice": []}}, "empty_array", "structured_outputs.choice"),
        ({"structured_outputs": {"json": DEEP}}, "invalid_json_schema", "structured_outputs.json"),
        ({"structured_outputs": {"json": "{"}}, "invalid_json_schema", "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "unsupported_value", "structured_outputs.structural_tag"),
        ({"guided_choice": ["a"]}, "unsupported_value", "guided_choice"),
        ({"allowed_token_ids": [1]}, "unsupported_value", "allowed_token_ids"),
        ({"use_beam_search": True}, "unsupported_value", "use_beam_search"),
        ({"no_stop_trim": True}, "unsupported_value", "no_stop_trim"),
        ({"prompt_logprobs": 0}, "unsupported_value", "prompt_logprobs"),
        ({"add_generation_prompt": False}, "unsupported_value", "add_generation_prompt"),
        ({"response_format": {"type": "structural_tag"}}, "unsupported_value", "response_format.type"),
        ({"structured_outputs": {}}, "invalid_value", "structured_outputs"),
        ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
    ],
)  # fmt: skip
def test_what_is_refused(client: openai.OpenAI, fields: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="small", messages=USER, extra_body=fields)
    assert (refused.value.code, refused.value.param) == (code, param)


def test_what_a_name_may_be_is_told(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "a.b"}}]
    with pytest.raises(openai.BadRequestError, match=r'"a\.b"; it must match \^\[a-zA-Z0-9_-\]\{1,64\}\$'):
        client.chat.completions.create(model="small", messages=USER, extra_body={"tools": tools})


def test_a_complaint_about_a_schema_shows_no_grammar_of_ours(client: openai.OpenAI, gateway: RunningGateway) -> None:
    where = "at 6(9): failed to compile JSON schema: "
    lines = '\n   4 | begin[lazy]: TEXT "<tool_call>"\n   6 | call_0: %json {"type"'
    gateway.verify[0].refuse = InvalidArgument(
        f"sampling.grammar.ebnf: {where}no such\n   type{lines}", field="sampling.grammar", code="invalid_grammar"
    )
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"tools": [tool]}, "invalid_json_schema", "tools: no such\n   type"),
        ({"ebnf": "x"}, "invalid_grammar", f"ebnf: {where}no such\n   type{lines}"),
    ]
    for fields, code, message in cases:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="small", messages=USER, extra_body=fields)
        assert (refused.value.code, refused.value.body["message"]) == (code, message)  # type: ignore[index]
    asked = {"type": "json_schema", "name": "f", "schema": {"type": "object"}}
    reply = httpx.post(f"{gateway.url}/v1/responses", json={"input": "Hi!", "text": {"format": asked}})
    error = reply.json()["error"]
    assert (error["code"], error["message"]) == ("invalid_json_schema", "text.format: no such\n   type")


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/v1/completions", {"prompt": "x", "regex": "[a"}, "regex"),
        ("/v1/chat/completions", {"messages": USER, "regex": "[a"}, "regex"),
        ("/v1/chat/completions", {"messages": USER, "structured_outputs": {"regex": "[a"}}, "structured_outputs.regex"),
        ("/generate", {"text": "x", "sampling_params": {"regex": "[a"}}, "sampling_params.regex"),
    ],
)
def test_a_complaint_about_a_regex_shows_no_grammar_of_ours(
    gateway: RunningGateway, path: str, fields: dict[str, Any], name: str
) -> None:
    told = 'invalid regex "[a" (in regex): regex parse error:\n    [a\n    ^\nerror: unclosed character class'
    gateway.verify[0].refuse = InvalidArgument(
        f"sampling.grammar.regex: at 1(8): {told}\n   1 | start: /[a/\n              ^\n",
        field="sampling.grammar", code="invalid_grammar",
    )  # fmt: skip
    error = httpx.post(gateway.url + path, json=fields).json()["error"]
    assert (error["code"], error["param"], error["message"]) == ("invalid_grammar", name, f"{name}: {told}")


# ---- Reasoning


@pytest.fixture(scope="module")
def thinking(folder: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningGateway]:
    """A gateway that tells reasoning apart."""
    with started(folder, tokenizer, tmp_path_factory.mktemp("thinking"), reasoning_parser="qwen3") as gateway:
        yield gateway


def test_reasoning_is_told_apart(thinking: RunningGateway, tokenizer: Tokenizer) -> None:
    thoughts = "Rome is hot."
    say(thinking, tokenizer, f"<think>\n{thoughts}\n</think>\n\nHot.\n{TWO_CALLS[6:]}")
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none", max_retries=0) as client:
        made: Any = client.chat.completions.create(model="small", messages=USER, tools=[WEATHER, NOW])
        message = made.choices[0].message
        assert (message.reasoning_content, message.content, len(message.tool_calls)) == (thoughts, "Hot.", 2)
        counted = made.usage.completion_tokens_details.reasoning_tokens
        inside = tokenizer.encode(f"<think>\n{thoughts}\n</think>", add_special_tokens=False).ids
        assert abs(counted - len(inside)) <= 1
        pieces: dict[str, str] = {"reasoning_content": "", "content": ""}
        for chunk in client.chat.completions.create(model="small", messages=USER, tools=[WEATHER, NOW], stream=True):
            delta: Any = chunk.choices[0].delta
            for name in pieces:
                pieces[name] += getattr(delta, name, None) or ""
        assert pieces == {"reasoning_content": thoughts, "content": "Hot."}
        whole: Any = client.chat.completions.create(
            model="small", messages=USER, extra_body={"separate_reasoning": False}
        )
        assert whole.choices[0].message.content.startswith("<think>\n")
        made = client.chat.completions.create(model="small", messages=USER, response_format={"type": "json_object"})
        assert "thoughts" in thinking.verify[0].requests[-1].sampling.grammar.ebnf


@pytest.mark.parametrize(
    ("form", "calls"),
    [
        ("hermes", TWO_CALLS[6:]),
        ("llama3_json", '{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "now"}'),
    ],
)
def test_reasoning_goes_before_strict_calls(tmp_path: Path, form: str, calls: str) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    asked: Any = {"model": "small", "messages": USER, "tools": [strict, NOW]}
    tokenizer = models.byte_level()
    folder = models.write_folder(tmp_path / "model", tokenizer, f"{{{{ tools }}}}{models.CHATML}")
    with (
        started(folder, tokenizer, tmp_path, reasoning_parser="qwen3", tool_call_parser=form) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        say(gateway, tokenizer, f"<think>\nRome is hot.\n</think>\n\n{calls}")
        made: Any = client.chat.completions.create(**asked)
        message = made.choices[0].message
        assert (message.reasoning_content, message.content) == ("Rome is hot.", None)
        assert [call.function.name for call in message.tool_calls] == ["weather", "now"]
        assert made.usage.completion_tokens_details.reasoning_tokens
        thoughts, names = "", []
        for chunk in client.chat.completions.create(**asked, stream=True):
            delta: Any = chunk.choices[0].delta
            assert not delta.content
            thoughts += getattr(delta, "reasoning_content", None) or ""
            names += [call.function.name for call in delta.tool_calls or () if call.id]
        assert (thoughts, names) == ("Rome is hot.", ["weather", "now"])
        grammar = gateway.verify[0].requests[-1].sampling.grammar.ebnf
        assert grammar.index("<think>") < grammar.index("weather")
