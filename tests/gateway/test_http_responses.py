"""/v1/responses through the official client: text, streams of events, tools, parsed output, and what is refused."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from tokenizers import Tokenizer

from gateway import offload, responses_api
from gateway.body import BodyDecoder
from gateway.responses_input import as_chat
from gateway.responses_schemas import InputItem, InputPart, ResponsesRequest
from gateway.responses_tools import RequestTools
from outrider.errors import InvalidArgument
from tests.gateway.conftest import ANSWER
from tests.gateway.fakes import RunningGateway
from tests.gateway.test_http_tools import prompt_of, say, started

WEATHER: Any = {
    "type": "function", "name": "weather", "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}  # fmt: skip
DEEP = functools.reduce(lambda inner, _: {"items": inner}, range(40), {})
CALL = 'Wait.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def shared(folder: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningGateway]:
    """A gateway that tells reasoning apart."""
    with started(folder, tokenizer, tmp_path_factory.mktemp("responses"), reasoning_parser="qwen3") as gateway:
        yield gateway


def test_text(client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer) -> None:
    made = client.responses.create(
        model="small", input="Hi!", instructions="Be kind.", max_output_tokens=99, temperature=0.5,
        metadata={"a": "b"}, extra_body={"seed": 4, "speculative": {"enabled": False}},
    )  # fmt: skip
    assert (made.output_text, made.status, made.object) == (ANSWER, "completed", "response")
    assert (made.instructions, made.metadata, made.temperature) == ("Be kind.", {"a": "b"}, 0.5)
    assert made.usage is not None
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    request = gateway.verify[0].requests[-1]
    assert (request.sampling.seed, request.sampling.max_tokens, request.speculative.enabled) == (4, 99, False)
    assert prompt_of(gateway, tokenizer) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    )


def test_origins_come_when_asked(client: openai.OpenAI) -> None:
    def events(**speculative: Any) -> list[dict[str, Any]]:
        stream = client.responses.create(
            model="small", input="Hi!", stream=True, extra_body={"speculative": speculative}
        )
        return [event.to_dict() for event in stream]

    assert not any("outrider" in event for event in events())
    asked = events(include_origins=True, include_trees=True)
    told = [event["outrider"] for event in asked if event["type"] == "response.outrider"]
    tokens = [token for one in told for token in one.get("tokens", ())]
    assert "".join(token["text"] for token in tokens) == ANSWER
    assert [event["sequence_number"] for event in asked] == list(range(len(asked)))
    with client.responses.stream(
        model="small", input="Hi!", extra_body={"speculative": {"include_origins": True}}
    ) as stream:
        assert stream.get_final_response().output_text == ANSWER


def test_items_go_back(client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer) -> None:
    say(gateway, tokenizer, f"<think>Hm.</think>{CALL}")
    first = client.responses.create(model="small", input="Hi!", tools=[WEATHER])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    call = first.output[-1]
    assert call.type == "function_call"
    assert (call.name, call.arguments, call.status) == ("weather", '{"city": "Rome"}', "completed")
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi!"}]}, *first.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "Fine."},
    ]  # fmt: skip
    client.responses.create(model="small", input=items, tools=[WEATHER])
    assert prompt_of(gateway, tokenizer).endswith(
        "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\nWait.\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nFine.\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_reasoning_goes_with_what_follows_it() -> None:
    def thought(text: str) -> InputItem:
        return InputItem(type="reasoning", content=[InputPart(type="reasoning_text", text=text)])

    call = InputItem(type="function_call", call_id="c", name="f", arguments="{}")
    output = InputItem(type="function_call_output", call_id="c", output="1")
    said = InputItem(role="assistant", content="Wait.")
    items = [InputItem(role="user", content="Hi!"), thought("a"), said, thought("b"), thought("c"), call, output,
             thought("d"), said, said, thought("e")]  # fmt: skip
    chat = as_chat(ResponsesRequest(input=items), RequestTools(), BodyDecoder(strict_fields=True).leave_out)
    assert [(message.role, message.reasoning_content) for message in chat.messages] == [
        ("user", None), ("assistant", "a\nb\nc"), ("tool", None), ("assistant", "d"), ("assistant", None),
    ]  # fmt: skip


def test_stream(client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer) -> None:
    say(gateway, tokenizer, f"<think>Hm.</think>{CALL}")
    events = list(client.responses.create(model="small", input="Hi!", tools=[WEATHER], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    deltas: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            deltas[event.type] = deltas.get(event.type, "") + event.delta  # type: ignore[union-attr]
    assert deltas == {
        "response.reasoning_text.delta": "Hm.", "response.output_text.delta": "Wait.",
        "response.function_call_arguments.delta": '{"city": "Rome"}',
    }  # fmt: skip
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.status for item in added] == ["in_progress"] * 3  # type: ignore[union-attr]
    assert events[-1].type == "response.completed"
    assert events[-1].response.output == done
    assert [item.id for item in added] == [item.id for item in done]


def test_the_clients_own_helpers(client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer) -> None:
    class Answer(BaseModel):
        city: str

    say(gateway, tokenizer, '{"city": "Rome"}')
    made = client.responses.parse(model="small", input="Where?", text_format=Answer)
    assert made.output_parsed == Answer(city="Rome")
    with client.responses.stream(model="small", input="Where?", text_format=Answer) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == Answer(city="Rome")
    request = gateway.verify[0].requests[-1]
    assert request.sampling.grammar.WhichOneof("kind") == "ebnf"  # reasoning may go before it

    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as other:
            return (await other.responses.create(model="small", input="Where?")).output_text

    assert asyncio.run(ask()) == '{"city": "Rome"}'


def test_a_cut_response_is_incomplete(client: openai.OpenAI) -> None:
    made = client.responses.create(model="small", input="Hi!", max_output_tokens=3)
    assert made.status == "incomplete"
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    *_, last = client.responses.create(model="small", input="Hi!", max_output_tokens=3, stream=True)
    assert last.type == "response.incomplete"
    assert last.response.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_an_empty_answer_is_a_message(client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer) -> None:
    say(gateway, tokenizer, "")
    made: Any = client.responses.create(model="small", input="Hi!")
    (item,) = made.output
    assert (made.status, item.type, item.status, made.output_text) == ("completed", "message", "completed", "")
    assert [(part.type, part.text, part.annotations) for part in item.content] == [("output_text", "", [])]
    events: Any = list(client.responses.create(model="small", input="Hi!", stream=True))
    assert [event.type for event in events] == [f"response.{name}" for name in (
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done", "completed",
    )]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output == [events[-2].item]


FORCED_CALL = '[{"name": "weather", "arguments": {"city": "Rome"}}]'


@pytest.mark.parametrize(
    ("stop", "items"),
    [
        (":", [("message", "completed", "")]),
        (",", [("function_call", "incomplete", "")]),
        ("}", [("function_call", "incomplete", '{"city": "Rome"')]),
        ("}]", [("function_call", "completed", '{"city": "Rome"}')]),
    ],
)
def test_a_call_that_a_stop_string_cuts(
    client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer, stop: str, items: list[tuple[str, str, str]]
) -> None:
    say(gateway, tokenizer, FORCED_CALL)
    asked: Any = {"model": "small", "input": "Hi!", "tools": [WEATHER], "tool_choice": "required",
                  "extra_body": {"stop": [stop]}}  # fmt: skip
    made: Any = client.responses.create(**asked)
    assert [
        (item.type, item.status, item.arguments if item.type == "function_call" else item.content[0].text)
        for item in made.output
    ] == items
    events: Any = list(client.responses.create(**asked, stream=True))
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [(item.type, item.status) for item in done] == [item[:2] for item in items]


@pytest.mark.parametrize("fields", [{"tools": []}, {}])
@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_a_choice_among_no_tools(gateway: RunningGateway, fields: dict[str, Any], choice: str | None) -> None:
    reply = httpx.post(f"{gateway.url}/v1/responses", json={"input": "Hi!", "tool_choice": choice, **fields})
    assert reply.status_code == 200
    assert (reply.json()["tools"], reply.json()["tool_choice"]) == ([], choice or "auto")


def test_settings_come_back_as_they_were_given(gateway: RunningGateway) -> None:
    form, choice = {"type": "text"}, {"type": "function", "name": WEATHER["name"]}
    given: dict[str, Any] = {"text": {"format": form}, "max_tool_calls": 3, "tools": [WEATHER], "tool_choice": choice}
    reply = httpx.post(f"{gateway.url}/v1/responses", json={"input": "Hi!", **given}).json()
    assert (reply["text"]["format"], reply["max_tool_calls"], reply["tool_choice"]) == (form, 3, choice)


def test_logprobs(client: openai.OpenAI) -> None:
    made: Any = client.responses.create(
        model="small", input="Hi!", include=["message.output_text.logprobs"], top_logprobs=1
    )
    logprobs = made.output[0].content[0].logprobs
    assert b"".join(bytes(entry.bytes) for entry in logprobs).decode() == ANSWER
    assert all(len(entry.top_logprobs) == 1 for entry in logprobs)


@pytest.mark.parametrize("stream", [False, True])
def test_many_logprobs_are_written_beside_the_event_loop(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    loop, threads = gateway.loop.run(_thread()), list[threading.Thread]()

    def noting(work: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            threads.append(threading.current_thread())
            return work(*args)

        return noted

    monkeypatch.setattr(responses_api, "json_response", noting(responses_api.json_response))
    monkeypatch.setattr(responses_api._Run, "_encode", noting(responses_api._Run._encode))
    monkeypatch.setattr(offload, "INLINE_BYTES", offload.LOGPROB_COST)
    body = {"model": "small", "input": "Hi!", "top_logprobs": 1, "stream": stream}
    assert httpx.post(f"{gateway.url}/v1/responses", json=body).status_code == 200
    assert threads.pop() is not loop
    assert set(threads) <= {loop}  # a delta's events are few


async def _thread() -> threading.Thread:
    return threading.current_thread()


@pytest.mark.parametrize(
    "thoughts",
    ["<think>\nHm, naïve.\n</think>\n\n", "<think>\n\n</think>\n\n", "<think>k</think>", "<think>kk</think>", ""],
)
def test_a_messages_logprobs_are_its_texts(
    client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer, thoughts: str
) -> None:
    def told(*parts: Any) -> str:
        return b"".join(bytes(entry.bytes) for part in parts for entry in part.logprobs).decode()

    say(gateway, tokenizer, f"{thoughts}Wait, 東京.{CALL[5:]} \nDone.")
    asked: Any = {"model": "small", "input": "Hi!", "tools": [WEATHER], "include": ["message.output_text.logprobs"]}
    made = client.responses.create(**asked)
    messages = [item.content[0] for item in made.output if item.type == "message"]
    assert [(text.text, told(text)) for text in messages] == [("Wait, 東京.",) * 2, ("Done.",) * 2]
    events = [event for event in client.responses.create(**asked, stream=True) if "output_text.delta" in event.type]
    assert told(*events) == "Wait, 東京.Done."


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"previous_response_id": "resp_1"}, "unsupported_value", "previous_response_id"),
        ({"background": True}, "unsupported_value", "background"),
        ({"n": 2}, "unsupported_value", "n"),
        ({"truncation": "auto"}, "unsupported_value", "truncation"),
        ({"include": ["x"]}, "unsupported_value", "include[0]"),
        ({"input": []}, "empty_array", "input"),
        ({"input": None}, "invalid_type", "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "unsupported_value", "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "unsupported_content",
         "input[0].content[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "invalid_value", "input[0].role"),
        ({"input": [{"role": "tool", "content": "x"}]}, "invalid_value", "input[0].role"),
        ({"input": [{"role": "user", "content": []}]}, "empty_array", "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "missing_required_parameter",
         "input[0].content[0].text"),
        ({"input": [{"type": "function_call_output", "call_id": "", "output": "x"}]}, "missing_required_parameter",
         "input[0].call_id"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "missing_required_parameter", "input[0].call_id"),
        ({"tools": [], "tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "invalid_value", "tools[1].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "missing_required_parameter", "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "g"}}, "invalid_value", "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "g"}]}},
         "invalid_value", "tool_choice.tools[0].name"),
        ({"text": {"format": {"type": "magic"}}}, "invalid_value", "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "missing_required_parameter",
         "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": DEEP}}}, "invalid_json_schema",
         "text.format.schema"),
        ({"text": {"format": {"type": "json_object", "schema": DEEP}}}, "invalid_json_schema", "text.format.schema"),
        ({"structured_outputs": {"regex": "a"}}, "unsupported_value", "structured_outputs"),
        ({"max_output_tokens": 2**30}, "context_length_exceeded", "max_output_tokens"),
    ],
)  # fmt: skip
def test_what_is_refused(gateway: RunningGateway, fields: dict[str, Any], code: str, param: str) -> None:
    reply = httpx.post(f"{gateway.url}/v1/responses", json={"input": "Hi!", **fields})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert "messages[" not in error["message"]


@pytest.mark.parametrize("strict", [True, False, None])
def test_only_a_strict_format_is_held_to_all_of_its_schema(gateway: RunningGateway, strict: bool | None) -> None:
    schema = {"type": "array", "uniqueItems": True}
    asked = {"type": "json_schema", "name": "n", "schema": schema, "strict": strict}
    httpx.post(f"{gateway.url}/v1/responses", json={"input": "Hi!", "text": {"format": asked}})
    held = str(gateway.verify[0].requests[-1].sampling.grammar)
    assert ("array" in held, "uniqueItems" in held) == (True, bool(strict))


def test_verifys_complaint_about_a_schema(gateway: RunningGateway) -> None:
    gateway.verify[0].refuse = InvalidArgument(
        "sampling.grammar: no", field="sampling.grammar", code="invalid_json_schema"
    )
    body = {"input": "Hi!", "text": {"format": {"type": "json_object"}}, "stream": True}
    reply = httpx.post(f"{gateway.url}/v1/responses", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "text.format")
    assert reply.json()["error"]["message"] == "text.format: no"
    body = {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "f"}}]}  # fmt: skip
    reply = httpx.post(f"{gateway.url}/v1/chat/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")
    for route, prompt in (("chat/completions", {"messages": body["messages"]}), ("completions", {"prompt": "x"})):
        reply = httpx.post(f"{gateway.url}/v1/{route}", json={**prompt, "regex": "("})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "regex")
    one: dict[str, Any] = {"text": "x", "sampling_params": {"regex": "("}}
    several: dict[str, Any] = {"text": ["x"], "sampling_params": [{"json_schema": "{}"}]}
    for native, param in ((one, "sampling_params.regex"), (several, "sampling_params[0].json_schema")):
        error = httpx.post(f"{gateway.url}/generate", json=native).json()["error"]
        assert (error["param"], error["message"]) == (param, f"{param}: no")
