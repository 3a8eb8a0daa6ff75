"""/v1/completions and SGLang's native routes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from outrider.errors import InvalidArgument
from outrider.v1 import verify_pb2
from outrider.wire import unpack_ids
from tests.gateway.conftest import ANSWER
from tests.gateway.fakes import FakeVerify, RunningGateway, running
from tests.polling import until


def prompts(gateway: RunningGateway) -> list[list[int]]:
    """Prompts that verify was given, in order of their names."""
    requests = sorted(gateway.verify[0].requests, key=lambda request: request.request_id)
    return [unpack_ids(request.prompt_tokens, field="").tolist() for request in requests]


def say_prompt(gateway: RunningGateway) -> None:
    """Lets verify repeat each prompt, its choice index first."""

    def say(request: verify_pb2.GenerateRequest, choice: int) -> list[int]:
        return [ord("0") - 33 + 3 + choice, *unpack_ids(request.prompt_tokens, field="").tolist()]

    gateway.verify[0].say = say


def test_completion(client: openai.OpenAI, gateway: RunningGateway) -> None:
    made = client.completions.create(model="small", prompt="<|im_start|>Hi", max_tokens=99)
    (choice,) = made.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (ANSWER, "stop", None)
    assert (made.object, made.id.startswith("cmpl-")) == ("text_completion", True)
    assert prompts(gateway)[0][0] == 1  # who writes the whole prompt may write control tokens


def test_an_added_token_that_the_model_has_no_embedding_of_is_text(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    last = tokenizer.get_vocab_size() - 1
    assert tokenizer.id_to_token(last) == "two words"
    with running({}, lambda: [FakeVerify(folder, vocab_size=last)], tmp_path) as gateway:
        with httpx.Client(base_url=gateway.url) as http:
            for path, body in (
                ("/v1/completions", {"prompt": "say two words"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "say two words"}]}),
            ):
                assert http.post(path, json=body).status_code == 200
        for ids in prompts(gateway):
            assert "say two words" in tokenizer.decode(ids)
            assert max(ids) < last


def test_equal_prompts_are_as_many_samples(client: openai.OpenAI, gateway: RunningGateway) -> None:
    def seeds(**fields: Any) -> list[int]:
        gateway.verify[0].requests.clear()
        client.completions.create(model="small", prompt=["Hi", "Hi", "Hi"], **fields)
        return [request.sampling.seed for request in gateway.verify[0].requests]

    assert len(set(seeds())) == 3
    assert seeds(seed=5) == [5, 5, 5]


def test_no_completion_of_a_prompt_that_fills_the_context(gateway: RunningGateway) -> None:
    """The token that verify makes has no place there."""
    context = gateway.verify[0].context_length
    body = {"prompt": [5] * context, "max_tokens": 0, "echo": True}
    refused = httpx.post(f"{gateway.url}/v1/completions", json=body).json()["error"]
    assert refused["param"] == "prompt"
    assert f"{context} in the prompt, and one token is made in any case" in refused["message"]
    refused = httpx.post(f"{gateway.url}/v1/completions", json=body | {"prompt": [5], "min_tokens": 3}).json()["error"]
    assert "min_tokens is 3, above max_tokens, 0" in refused["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "Hi", "logprobs": 2}, "logprobs"),
        ("/generate", {"text": "Hi", "return_logprob": True, "top_logprobs_num": 2}, "top_logprobs_num"),
    ],
)
def test_verifys_complaint_about_alternatives_names_the_callers_field(
    gateway: RunningGateway, path: str, body: dict[str, Any], field: str
) -> None:
    gateway.verify[0].refuse = InvalidArgument("too many", field="top_logprobs")
    assert httpx.post(gateway.url + path, json=body).json()["error"]["param"] == field


def test_default_length(client: openai.OpenAI, gateway: RunningGateway) -> None:
    gateway.verify[0].say = lambda request, choice: range(40, 90)
    made = client.completions.create(model="small", prompt="Hi")
    assert made.choices[0].finish_reason == "length"
    assert made.usage is not None
    assert made.usage.completion_tokens == 16
    context = gateway.verify[0].context_length
    made = client.completions.create(model="small", prompt=[5] * (context - 3))
    assert made.usage is not None
    assert made.usage.completion_tokens == 3


def test_ids_echo_and_stream(client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Say: ", add_special_tokens=False).ids
    made = client.completions.create(model="small", prompt=ids, echo=True, max_tokens=99)
    assert made.choices[0].text == "Say: " + ANSWER
    assert prompts(gateway) == [ids]
    chunks = list(
        client.completions.create(
            model="small", prompt="Say: ", echo=True, max_tokens=99, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "Say: " + ANSWER
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert made.usage is not None
    assert chunks[-1].usage.completion_tokens == made.usage.completion_tokens


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "xa"), (4, "xa"), (5, "xaaab ok")])
def test_a_stop_string_across_the_end_of_min_tokens(
    gateway: RunningGateway, tokenizer: Tokenizer, min_tokens: int, text: str
) -> None:
    verify = gateway.verify[0]
    ids = [tokenizer.encode(char, add_special_tokens=False).ids[0] for char in "xaaab ok"]
    verify.say = lambda request, choice: [*ids, verify.eos]
    body = {"prompt": "Hi", "max_tokens": 99, "min_tokens": min_tokens, "stop": "aab"}
    made = httpx.post(f"{gateway.url}/v1/completions", json=body).json()
    assert (made["choices"][0]["text"], made["choices"][0]["finish_reason"]) == (text, "stop")
    stream = httpx.post(f"{gateway.url}/v1/completions", json=body | {"stream": True}).text
    chunks = [json.loads(event.removeprefix("data: ")) for event in stream.split("\n\n")[:-2]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    body = {"text": "Hi", "sampling_params": {"max_new_tokens": 99, "min_new_tokens": min_tokens, "stop": "aab"}}
    assert httpx.post(f"{gateway.url}/generate", json=body).json()["text"] == text


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
def test_stream_options_and_the_fingerprint(gateway: RunningGateway, path: str, prompt: dict[str, Any]) -> None:
    def ask(**fields: Any) -> str:
        return httpx.post(gateway.url + path, json={**prompt, "seed": 5, "max_tokens": 99, **fields}).text

    def chunks(**options: bool) -> list[dict[str, Any]]:
        events = ask(stream=True, stream_options=options).split("\n\n")[:-2]
        return [json.loads(event.removeprefix("data: ")) | {"id": "", "created": 0} for event in events]

    whole = json.loads(ask())
    assert whole["system_fingerprint"] == f"fp_{gateway.verify[0].numerics_id}"
    told = chunks(include_usage=True, continuous_usage_stats=True)
    assert {chunk["system_fingerprint"] for chunk in told} == {whole["system_fingerprint"]}
    counts = [chunk["usage"]["completion_tokens"] for chunk in told]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    assert told[-1]["usage"] == whole["usage"]
    assert {chunk["usage"]["prompt_tokens"] for chunk in told} == {whole["usage"]["prompt_tokens"]}
    plain = chunks(include_usage=True)
    assert [chunk["usage"] for chunk in plain] == [None] * (len(plain) - 1) + [whole["usage"]]
    assert chunks(continuous_usage_stats=True) == chunks()  # which has no usage to put there
    assert chunks(include_usage=True, include_obfuscation=True) == plain


def test_several_prompts(client: openai.OpenAI, gateway: RunningGateway) -> None:
    say_prompt(gateway)
    made = client.completions.create(model="small", prompt=["aaa", "bb", "c"], n=2, max_tokens=99)
    assert [choice.text for choice in made.choices] == ["0aaa", "1aaa", "0bb", "1bb", "0c", "1c"]
    assert [choice.index for choice in made.choices] == list(range(6))
    assert made.usage is not None
    assert made.usage.prompt_tokens == sum(map(len, prompts(gateway)))
    texts = [""] * 6
    for chunk in client.completions.create(model="small", prompt=[[70], [71, 72]], n=2, max_tokens=99, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert len({len(text) for text in texts[:2]}) == 1
    assert [text[:1] for text in texts] == ["0", "1", "0", "1", "", ""]


def test_a_prompt_of_mixed_kinds(client: openai.OpenAI) -> None:
    wrong: Any = ["a", 5]
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="small", prompt=wrong)
    assert (refused.value.code, refused.value.param) == ("invalid_type", "prompt")


def test_generate(gateway: RunningGateway, tokenizer: Tokenizer) -> None:
    gateway.verify[0].cached_tokens = 1
    body = {
        "text": "Hi",
        "sampling_params": {"max_new_tokens": 99, "temperature": 0, "sampling_seed": 4},
        "rid": "mine",
        "priority": -2,
        "cache_salt": "sea",
    }
    made = httpx.post(f"{gateway.url}/generate", json=body).json()
    ids = [*tokenizer.encode(ANSWER, add_special_tokens=False).ids, 2]
    assert (made["text"], made["output_ids"]) == (ANSWER, ids)
    meta = made["meta_info"]
    assert meta["e2e_latency"] > 0
    steps, drafts = -(-(len(ids) - 1) // 3), len(ids) - 1 - -(-(len(ids) - 1) // 3)
    expected = {
        "id": "mine", "finish_reason": {"type": "stop", "matched": 2}, "prompt_tokens": len(prompts(gateway)[0]),
        "completion_tokens": len(ids), "cached_tokens": 1, "spec_verify_ct": steps,
        "spec_accept_length": len(ids) / steps, "spec_accept_rate": drafts / (4 * steps),
        "spec_num_correct_drafts": drafts, "spec_num_proposed_drafts": 4 * steps,
        "spec_accept_token_num": drafts, "spec_draft_token_num": 4 * steps,
        "spec_accepted_drafts": drafts, "spec_proposed_drafts": 4 * steps,
    }  # fmt: skip
    assert {name: meta[name] for name in expected} == expected
    assert sum(meta["spec_accept_histogram"]) == steps
    request = gateway.verify[0].requests[0]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (99, 0, 4)
    assert (request.priority, request.cache_salt) == (-2, "sea")


def test_generate_batches(gateway: RunningGateway) -> None:
    say_prompt(gateway)
    body: dict[str, Any] = {"text": ["aaa", "bb"], "sampling_params": {"max_new_tokens": 99, "n": 2}}
    made = httpx.post(f"{gateway.url}/generate", json=body).json()
    assert [entry["text"] for entry in made] == ["0aaa", "1aaa", "0bb", "1bb"]
    body = {"input_ids": [[70], [71]], "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}]}
    made = httpx.post(f"{gateway.url}/generate", json=body).json()
    assert [len(entry["output_ids"]) for entry in made] == [1, 2]
    assert made[0]["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
    assert "spec_verify_ct" not in made[0]["meta_info"]
    assert isinstance(httpx.post(f"{gateway.url}/generate", json={"input_ids": [70]}).json(), dict)


def test_generate_stream(gateway: RunningGateway) -> None:
    """Each event repeats the whole text so far, as SGLang's do."""
    body = {"text": "Hi", "sampling_params": {"max_new_tokens": 99, "stop": "naïve"}, "stream": True}
    reply = httpx.post(f"{gateway.url}/generate", json=body)
    *events, done = [event.removeprefix("data: ") for event in reply.text.split("\n\n")[:-1]]
    assert done == "[DONE]"
    entries = [json.loads(event) for event in events]
    for before, after in pairwise(entries):
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None
    assert entries[-1]["text"] == ANSWER.partition("naïve")[0]
    assert entries[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "naïve"}
    assert entries[-1]["meta_info"]["completion_tokens"] == len(entries[-1]["output_ids"])


def test_generate_streams_a_list(gateway: RunningGateway) -> None:
    say_prompt(gateway)
    each = [{"max_new_tokens": 99, "n": n} for n in (2, 1, 3)]
    reply = httpx.post(
        f"{gateway.url}/generate", json={"text": ["a", "b", "c"], "sampling_params": each, "stream": True}
    )
    last: dict[int, str] = {}
    for event in reply.text.split("\n\n")[:-2]:
        entry = json.loads(event.removeprefix("data: "))
        last[entry["index"]] = entry["text"]
    assert [last[index] for index in sorted(last)] == ["0a", "1a", "0b", "0c", "1c", "2c"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": "a", "rid": ["x", "y"]}, "rid"),
        ({"text": "a", "rid": "x" * 300}, "rid"),
        ({"text": "a", "sampling_params": {"regex": "a+", "ebnf": "root ::= x"}}, "sampling_params.ebnf"),
        ({"text": ["a"] * 2, "sampling_params": [{}, {"json_schema": "{}", "regex": "a"}]}, "sampling_params[1].regex"),
        ({"text": "a", "return_logprob": [True, False]}, "return_logprob"),
        ({"text": "a", "token_ids_logprob": [1]}, "token_ids_logprob"),
        ({"text": "a", "sampling_params": {"stop_regex": "a+"}}, "sampling_params.stop_regex"),
        ({"text": ["a"] * 2, "lora_path": [None, "x"]}, "lora_path"),
        ({"text": ["a"] * 2, "sampling_params": [{}, {"no_stop_trim": True}]}, "sampling_params[1].no_stop_trim"),
        ({"input_ids": [1, "a"]}, "input_ids[1]"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [10**6]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids[0]"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}, "stream": True}, "sampling_params.max_new_tokens"),
        ({"text": ["a"] * 99}, "text"),
        ({"text": "a", "sampling_params": {"n": 99}}, "sampling_params.n"),
        ({"text": ["a", "a"], "sampling_params": [{"n": 1}, {"n": 9}]}, "sampling_params[1].n"),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 5}},
            "sampling_params.min_new_tokens",
        ),
        ({"text": "a", "sampling_params": {"json_schema": f'{{"const": {2**60 + 1}}}'}}, "sampling_params.json_schema"),
        ({"text": ["a"] * 2, "sampling_params": [{}, {"json_schema": "{"}]}, "sampling_params[1].json_schema"),
        ({"text": "a", "sampling_params": {"logit_bias": {"x": 1}}}, "sampling_params.logit_bias"),
        ({"text": "a", "sampling_params": [{"logit_bias": {"5": 101}}]}, "sampling_params[0].logit_bias[5]"),
        ({"text": "a", "sampling_params": {"stop_token_ids": [99999]}}, "sampling_params.stop_token_ids"),
        ({"text": "a", "speculative": {"algorithm": "magic"}}, "speculative.algorithm"),
    ],
)
def test_generate_refuses(gateway: RunningGateway, body: dict[str, Any], param: str) -> None:
    reply = httpx.post(f"{gateway.url}/generate", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_schemas_of_a_batch_are_not_read_for_ever(gateway: RunningGateway) -> None:
    sets = [{"json_schema": "[" + "[]," * 20_000}] * 8
    reply = httpx.post(f"{gateway.url}/generate", json={"text": ["a"] * 8, "sampling_params": sets})
    assert reply.status_code == 413


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 5}},
         "min_new_tokens is 5, above max_new_tokens, 2."),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 999, "n": 8}}, "n times max_new_tokens is"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 3, "min_tokens": 5},
         "min_tokens is 5, above max_output_tokens, 3."),
        ("/v1/chat/completions",
         {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 3, "min_tokens": 5},
         "min_tokens is 5, above max_completion_tokens, 3."),
    ],
)  # fmt: skip
def test_messages_have_the_callers_names(gateway: RunningGateway, path: str, body: dict[str, Any], told: str) -> None:
    assert told in httpx.post(gateway.url + path, json=body).json()["error"]["message"]


def limits(gateway: RunningGateway) -> list[int]:
    """The max_tokens that verify was given, in order of the requests' names."""
    requests = sorted(gateway.verify[0].requests, key=lambda request: request.request_id)
    return [request.sampling.max_tokens for request in requests]


@pytest.mark.parametrize(("least", "most"), [(3, [16, 12]), (20, [20, 12]), (10**6, [511, 12])])
def test_the_default_length_gives_way_to_min_tokens_and_the_context(
    gateway: RunningGateway, least: int, most: list[int]
) -> None:
    body = {"prompt": [[5], [5] * 500], "min_tokens": least}
    assert httpx.post(f"{gateway.url}/v1/completions", json=body).status_code == 200
    assert limits(gateway) == most
    gateway.verify[0].reset()
    body = {"input_ids": [5], "sampling_params": {"min_new_tokens": 200}}
    assert httpx.post(f"{gateway.url}/generate", json=body).status_code == 200
    assert limits(gateway) == [200]


def test_verify_is_always_told_where_an_answer_ends(gateway: RunningGateway) -> None:
    """Another that has more context must not give a longer one."""
    body = {"messages": [{"role": "user", "content": "Hi!"}]}
    made = httpx.post(f"{gateway.url}/v1/chat/completions", json=body).json()
    assert limits(gateway) == [gateway.verify[0].context_length - made["usage"]["prompt_tokens"]]


def test_infos(gateway: RunningGateway, folder: Path) -> None:
    model = httpx.get(f"{gateway.url}/get_model_info").json()
    assert model["model_path"] == str(folder)
    assert model["tokenizer_path"] == str(folder)
    assert model["is_generation"] is True
    server = httpx.get(f"{gateway.url}/get_server_info").json()
    (state,) = server["internal_states"]
    assert state["avg_spec_accept_length"] == 2.5
    assert state["memory_usage"]["token_capacity"] == gateway.verify[0].max_total_tokens
    assert server["max_running_requests"] == 8
    assert server["model_path"] == str(folder)
    (load,) = httpx.get(f"{gateway.url}/v1/loads").json()["loads"]
    assert load == {
        "dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 2, "token_usage": 0.25,
        "max_total_num_tokens": gateway.verify[0].max_total_tokens, "max_running_requests": 8, "gen_throughput": 50.0,
        "speculative": {"accept_length": 2.5, "accept_rate": 0.5},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": ["Hi", "Ho", "Hm"]}),
        ("/v1/completions", {"prompt": "Hi", "n": 3, "stop": "never"}),
        ("/generate", {"text": ["Hi", "Ho", "Hm"]}),
    ],
)
def test_a_request_is_computed_alike_on_replicas_that_differ(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path, path: str, fields: dict[str, Any]
) -> None:
    said = {name: tokenizer.encode(name * 9, add_special_tokens=False).ids for name in "ab"}

    def fakes() -> list[FakeVerify]:
        return [
            FakeVerify(
                folder, tokenizer.get_vocab_size(), boot_id=name, numerics_id=name,
                say=lambda request, choice, ids=ids: [*ids, 2],
            )
            for name, ids in said.items()
        ]  # fmt: skip

    with running({}, fakes, tmp_path) as gateway:
        until(lambda: len(gateway.app.state.gateway.replicas.serving) == 2, "not both serve")
        for _ in range(5):
            made = httpx.post(gateway.url + path, json=fields).json()
            texts = {part["text"] for part in (made["choices"] if path != "/generate" else made)}
            assert texts in ({"a" * 9}, {"b" * 9})
            assert path == "/generate" or made["system_fingerprint"] == f"fp_{texts.pop()[0]}"
        assert all(verify.requests for verify in gateway.verify)
