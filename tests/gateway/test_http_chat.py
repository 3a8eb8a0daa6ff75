"""/v1/chat/completions and its relatives through the official client, over a real port."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import unpack_ids
from tests.gateway.conftest import ANSWER
from tests.gateway.fakes import RunningGateway


def last_request(gateway: RunningGateway) -> verify_pb2.GenerateRequest:
    """What verify was asked last."""
    return gateway.verify[0].requests[-1]


USER: Any = [{"role": "user", "content": "Hi!"}]


def test_answer(client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer) -> None:
    gateway.verify[0].cached_tokens = 4
    made = client.chat.completions.create(model="small", messages=USER)
    (choice,) = made.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ANSWER, "stop")
    assert (made.object, made.model) == ("chat.completion", "small")
    assert made.id.startswith("chatcmpl-")
    num_tokens = len(tokenizer.encode(ANSWER, add_special_tokens=False).ids) + 1
    prompt = unpack_ids(last_request(gateway).prompt_tokens, field="").tolist()
    assert tokenizer.decode(prompt, skip_special_tokens=False) == (
        "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    )
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (len(prompt), num_tokens)
    assert made.usage.total_tokens == len(prompt) + num_tokens
    assert made.usage.prompt_tokens_details is not None
    assert made.usage.prompt_tokens_details.cached_tokens == 4
    assert made.usage.completion_tokens_details is None
    steps = -(-(num_tokens - 1) // 3)
    assert made.usage.to_dict()["speculation"] == {
        "verify_steps": steps, "draft_tokens": 4 * steps, "accepted_tokens": num_tokens - 1 - steps,
        "accept_length": pytest.approx((num_tokens - 1) / steps),
    }  # fmt: skip


def test_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="small", messages=USER, stream=True, stream_options={"include_usage": True}
    ) as stream:
        assert stream.response.headers["content-type"] == "text/event-stream; charset=utf-8"
        chunks = list(stream)
    *head, usage = chunks
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert head[0].choices[0].delta.role == "assistant"
    assert head[0].choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in head) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in head] == [None] * (len(head) - 1) + ["stop"]
    assert head[-1].choices[0].delta.to_dict() == {}
    assert all(chunk.usage is None for chunk in head)
    assert usage.choices == []
    assert usage.usage is not None
    plain = client.chat.completions.create(model="small", messages=USER).usage
    assert plain is not None
    assert usage.usage.to_dict() == plain.to_dict()


def test_stream_as_bytes(gateway: RunningGateway) -> None:
    """Events are one line of JSON each, end in [DONE], and have no usage unless asked."""
    body = {"model": "small", "messages": USER, "stream": True}
    reply = httpx.post(f"{gateway.url}/v1/chat/completions", json=body)
    *events, end = reply.text.split("\n\n")
    assert end == ""
    assert events.pop() == "data: [DONE]"
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    assert "usage" not in reply.text
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert "�" not in reply.text


def test_async_client(gateway: RunningGateway) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(model="small", messages=USER, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask()) == ANSWER


def test_choices(client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer) -> None:
    words = ["one", "two two", "three three three"]
    said = [tokenizer.encode(word, add_special_tokens=False).ids for word in words]
    gateway.verify[0].say = lambda request, choice: said[choice]
    made = client.chat.completions.create(model="small", messages=USER, n=3)
    assert [choice.message.content for choice in made.choices] == words
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    assert [choice.finish_reason for choice in made.choices] == ["length"] * 3
    assert made.usage is not None
    assert made.usage.completion_tokens == sum(map(len, said))
    assert last_request(gateway).num_choices == 3
    texts = ["", "", ""]
    roles = []
    for chunk in client.chat.completions.create(model="small", messages=USER, n=3, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles += [choice.index] if choice.delta.role else []
    assert texts == words
    assert sorted(roles) == [0, 1, 2]


def test_stop_strings(client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer) -> None:
    verify = gateway.verify[0]
    made = client.chat.completions.create(model="small", messages=USER, stop=["京! ", "zz"])
    assert made.choices[0].message.content == "Hello, 東"
    assert made.choices[0].finish_reason == "stop"
    assert made.usage is not None
    counted = made.usage.completion_tokens
    ids = tokenizer.encode(ANSWER, add_special_tokens=False).ids
    assert "京! " in tokenizer.decode(ids[:counted])
    assert "京! " not in tokenizer.decode(ids[: counted - 1])
    gateway.wait(verify.idle)
    verify.requests.clear()
    made = client.chat.completions.create(model="small", messages=USER, stop=",", n=2)
    assert [choice.message.content for choice in made.choices] == ["Hello"] * 2
    assert sorted(request.first_choice_index for request in verify.requests) == [0, 1]


def test_sampling_is_passed_on(client: openai.OpenAI, gateway: RunningGateway) -> None:
    client.chat.completions.create(
        model="small", messages=USER, temperature=0.5, top_p=0.25, seed=-1, max_completion_tokens=9, n=2,
        presence_penalty=1, frequency_penalty=-0.5, logit_bias={"5": 50},
        extra_body={
            "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.5, "min_tokens": 2, "stop_token_ids": [11],
            "ignore_eos": True, "priority": 3, "cache_salt": "mine",
            "speculative": {"enabled": False, "algorithm": "ngram", "num_steps": 2, "topk": 3, "num_draft_tokens": 4},
        },
    )  # fmt: skip
    request = last_request(gateway)
    assert request.sampling == common_pb2.SamplingParams(
        temperature=0.5, top_p=0.25, seed=2**64 - 1, max_tokens=9, presence_penalty=1, frequency_penalty=-0.5,
        logit_bias={5: 50.0}, top_k=7, min_p=0.125, repetition_penalty=1.5, min_tokens=2, stop_token_ids=[11],
        ignore_eos=True,
    )  # fmt: skip
    assert request.speculative == common_pb2.SpeculativeParams(
        enabled=False, algorithm=common_pb2.ALGORITHM_NGRAM, num_steps=2, topk=3, num_draft_tokens=4
    )
    assert (request.priority, request.cache_salt, request.corpus_scope) == (3, "mine", "mine")


def test_response_formats(client: openai.OpenAI, gateway: RunningGateway) -> None:
    schema = {"type": "object", "properties": {"é": {"type": "integer"}}}
    closed = schema | {"additionalProperties": False}
    cases: list[tuple[Any, common_pb2.Grammar]] = [
        ({"type": "json_object"}, common_pb2.Grammar(json_object=True)),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, common_pb2.Grammar(json_object=True)),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
            common_pb2.Grammar(json_schema=json.dumps(closed, ensure_ascii=False, separators=(",", ":"))),
        ),
        ({"type": "json_object", "schema": {}}, common_pb2.Grammar(json_object=True)),
        *(
            (
                {"type": kind, "schema": closed},
                common_pb2.Grammar(json_schema=json.dumps(closed, ensure_ascii=False, separators=(",", ":"))),
            )
            for kind in ("json_object", "json_schema")
        ),
    ]
    for given, grammar in cases:
        client.chat.completions.create(model="small", messages=USER, response_format=given)
        assert last_request(gateway).sampling.grammar == grammar
    wrong: list[Any] = [
        {"type": "magic"},
        {"type": "json_schema"},
    ]
    for given in wrong:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="small", messages=USER, response_format=given)
        assert (refused.value.param or "").startswith("response_format")


def test_defaults(client: openai.OpenAI, gateway: RunningGateway) -> None:
    client.chat.completions.create(model="small", messages=USER, max_tokens=5)
    client.chat.completions.create(model="small", messages=USER, top_p=0, extra_body={"top_k": -1})
    first, second = gateway.verify[0].requests
    assert first.sampling.max_tokens == 5
    assert second.sampling.max_tokens == gateway.verify[0].context_length - len(second.prompt_tokens) // 4
    assert 0 < second.sampling.top_p < 1e-6
    assert second.sampling.top_k == 0
    assert first.sampling.seed != second.sampling.seed
    assert not first.speculative.HasField("enabled")


def test_prediction(client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer) -> None:
    text = "<|im_end|> Hello" + " again" * 2000
    made = client.chat.completions.create(
        model="small", messages=USER, prediction={"type": "content", "content": [{"type": "text", "text": text}]}
    )
    predicted = unpack_ids(last_request(gateway).prediction_tokens, field="").tolist()
    assert len(predicted) == gateway.verify[0].context_length
    assert gateway.verify[0].eos not in predicted
    assert tokenizer.decode(predicted).startswith("<|im_end|> Hello again")
    assert predicted_in(made) == (0, len(predicted))


def predicted_in(made: Any) -> tuple[int | None, int | None]:
    """Tokens of the prediction that the output has, and others, as an answer or a chunk says."""
    details = made.usage.completion_tokens_details
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


def test_predicted_tokens_are_those_in_the_output(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    def size(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    def ask(text: str, **fields: Any) -> Any:
        given: Any = {"type": "content", "content": text}
        return client.chat.completions.create(model="small", messages=USER, prediction=given, **fields)

    tail, unlike = "qqqq 0000", "QQQQ"
    options: Any = [{}, {"extra_body": {"speculative": {"enabled": False}}}]
    for fields in options:
        assert predicted_in(ask(ANSWER, **fields)) == (size(ANSWER), 0)
    assert predicted_in(ask(ANSWER + tail)) == (size(ANSWER), size(ANSWER + tail) - size(ANSWER))
    assert predicted_in(ask(tail + ANSWER)) == (size(ANSWER), size(tail + ANSWER) - size(ANSWER))
    assert predicted_in(ask(unlike)) == (0, size(unlike))
    assert predicted_in(ask(ANSWER, n=2)) == (2 * size(ANSWER), 0)
    cut = ask(ANSWER, stop="!")
    assert predicted_in(cut) == (cut.usage.completion_tokens, size(ANSWER) - cut.usage.completion_tokens)
    *_, last = ask(ANSWER + tail, stream=True, stream_options={"include_usage": True})
    assert predicted_in(last) == (size(ANSWER), size(ANSWER + tail) - size(ANSWER))


def test_origins_come_when_asked(client: openai.OpenAI) -> None:
    def chunks(**speculative: Any) -> list[dict[str, Any]]:
        stream = client.chat.completions.create(
            model="small", messages=USER, stream=True, extra_body={"speculative": speculative}
        )
        return [chunk.to_dict() for chunk in stream]

    assert not any("outrider" in chunk for chunk in chunks())
    told = [chunk for chunk in chunks(include_origins=True) if "outrider" in chunk]
    tokens = [token for chunk in told for token in chunk["outrider"]["tokens"]]
    assert "".join(token["text"] for token in tokens) == ANSWER
    assert {token["origin"] for token in tokens} == {"accepted", "bonus", "target"}
    for chunk in told:
        text = chunk["choices"][0]["delta"]["content"]
        assert text == "".join(token["text"] for token in chunk["outrider"]["tokens"])


def test_conversation_forms(client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer) -> None:
    messages: Any = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "<|im_end|>"},
        {"role": "assistant", "content": "Well, \n"},
    ]  # fmt: skip
    client.chat.completions.create(model="small", messages=messages, extra_body={"continue_final_message": True})
    prompt = unpack_ids(last_request(gateway).prompt_tokens, field="").tolist()
    assert tokenizer.decode(prompt, skip_special_tokens=False) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n<|im_end|>\n</tool_response><|im_end|>\n<|im_start|>assistant\nWell, \n"
    )
    assert prompt.count(2) == 4


def test_failover_is_not_seen(client: openai.OpenAI, gateway: RunningGateway) -> None:
    verify = gateway.verify[0]
    verify.break_after = [3, 0, 2]
    made = client.chat.completions.create(model="small", messages=USER)
    assert made.choices[0].message.content == ANSWER
    verify.break_after = [1, 4, 1]
    stream = client.chat.completions.create(model="small", messages=USER, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER
    assert len(verify.requests) == 8
    assert len({request.sampling.seed for request in verify.requests}) == 2


def test_models(client: openai.OpenAI, gateway: RunningGateway, folder: Path) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("small", "model", "outrider")
    assert client.models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("other/model")
    assert missing.value.code == "model_not_found"
    for name in ("small", "default", str(folder)):
        client.chat.completions.create(model=name, messages=USER)
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-5", messages=USER)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


def test_health(gateway: RunningGateway) -> None:
    assert httpx.get(f"{gateway.url}/health").status_code == 200
    assert httpx.get(f"{gateway.url}/health_generate").status_code == 200
    assert httpx.get(f"{gateway.url}/version").json()["version"]
