"""Log-probabilities over HTTP: chat, completions with echo, SGLang's lists. The fake's ln p of a token is -id/1000."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from gateway.completions import lengths_in
from outrider.v1 import verify_pb2
from outrider.wire import unpack_ids
from tests.gateway.conftest import ANSWER
from tests.gateway.fakes import RunningGateway

USER: Any = [{"role": "user", "content": "Hi!"}]


@pytest.fixture
def ids(tokenizer: Tokenizer) -> list[int]:
    """The answer's tokens."""
    return tokenizer.encode(ANSWER, add_special_tokens=False).ids


def test_chat(client: openai.OpenAI, ids: list[int]) -> None:
    made = client.chat.completions.create(model="small", messages=USER, logprobs=True, top_logprobs=2)
    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    content = logprobs.content or []
    assert [entry.logprob for entry in content] == pytest.approx([-token / 1000 for token in ids])
    assert b"".join(bytes(entry.bytes or ()) for entry in content).decode() == ANSWER
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(ids)
    assert content[0].top_logprobs[0].token == content[0].token == "H"
    assert content[0].top_logprobs[1].logprob == pytest.approx(-(ids[0] + 1) / 1000)
    plain = client.chat.completions.create(model="small", messages=USER)
    assert plain.choices[0].logprobs is None


@pytest.mark.parametrize("stop", [None, "naïve"])
def test_chat_stream(client: openai.OpenAI, ids: list[int], stop: str | None) -> None:
    stream = client.chat.completions.create(model="small", messages=USER, logprobs=True, stream=True, stop=stop)
    text, data = "", b""
    for chunk in stream:
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        for entry in (choice.logprobs.content or []) if choice.logprobs else []:
            assert entry.top_logprobs == []
            data += bytes(entry.bytes or ())
    assert text == (ANSWER if stop is None else ANSWER.partition(stop)[0])
    assert data.decode() == text


def test_the_token_that_was_sampled_is_always_among_the_alternatives(
    client: openai.OpenAI, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlikely(request: verify_pb2.GenerateRequest, token: int) -> verify_pb2.TokenLogprob:
        top = [verify_pb2.TopLogprob(token=40 + place, logprob=-0.5) for place in range(request.top_logprobs)]
        return verify_pb2.TokenLogprob(token=token, logprob=-7.0, top=top)

    monkeypatch.setattr(gateway.verify[0], "_logprob", unlikely)
    gateway.verify[0].say = lambda request, choice: [50, 51]
    (choice,) = client.completions.create(model="small", prompt="Say: ", logprobs=1, max_tokens=2).choices
    assert choice.logprobs is not None
    assert [len(top or ()) for top in choice.logprobs.top_logprobs or ()] == [2, 2]
    for token, top in zip(choice.logprobs.tokens or (), choice.logprobs.top_logprobs or (), strict=True):
        assert (top or {})[token] == -7.0


def test_completion_with_echo(
    client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer, ids: list[int]
) -> None:
    prompt = tokenizer.encode("Say: ", add_special_tokens=False).ids
    made = client.completions.create(model="small", prompt="Say: ", echo=True, logprobs=1, max_tokens=99)
    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    scores = logprobs.token_logprobs or []
    assert (scores[0], scores[1:]) == (None, pytest.approx([-token / 1000 for token in [*prompt[1:], *ids, 2]]))
    assert (logprobs.top_logprobs or [])[0] is None
    assert (logprobs.top_logprobs or [])[1] == {(logprobs.tokens or [])[1]: pytest.approx(-prompt[1] / 1000)}
    offsets = logprobs.text_offset or []
    assert (offsets[0], offsets[len(prompt)], sorted(offsets)) == (0, len("Say: "), offsets)
    scored = client.completions.create(model="small", prompt="Say: ", echo=True, logprobs=0, max_tokens=0)
    assert scored.choices[0].text == "Say: "
    assert scored.choices[0].logprobs is not None
    assert scored.choices[0].logprobs.token_logprobs == scores[: len(prompt)]
    assert scored.choices[0].logprobs.top_logprobs is None
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="small", prompt="Say: ", max_tokens=0)
    assert refused.value.code == "integer_below_min_value"


def test_tokens_of_parts_of_a_character_are_told_apart(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    prompt = "a👩‍🚀"
    made = client.completions.create(model="small", prompt=prompt, echo=True, logprobs=2, max_tokens=0)
    assert made.choices[0].logprobs is not None
    tokens, top = made.choices[0].logprobs.tokens or [], made.choices[0].logprobs.top_logprobs or []
    pieces = [
        bytes.fromhex(token.removeprefix("bytes:").replace("\\x", "")) if token.startswith("bytes:") else token.encode()
        for token in tokens
    ]
    assert b"".join(pieces).decode() == prompt
    assert any(token.startswith("bytes:") for token in tokens)
    assert all(token in alternatives for token, alternatives in zip(tokens[1:], top[1:], strict=True))
    assert all(len(alternatives) > 1 for alternatives in top[1:])


def test_offsets_point_into_the_echoed_text(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    prompt = "é, 東京 👩‍🚀: "
    made = client.completions.create(model="small", prompt=prompt, echo=True, logprobs=0, max_tokens=99)
    choice, num_tokens = made.choices[0], len(tokenizer.encode(prompt, add_special_tokens=False).ids)
    assert choice.text == prompt + ANSWER
    assert choice.logprobs is not None
    offsets = choice.logprobs.text_offset or []
    assert (offsets[0], offsets[num_tokens], sorted(offsets)) == (0, len(prompt), offsets)


@pytest.mark.parametrize(("lengths", "text", "expected"), [
    ([17, 2, 3], "Hello", [0, 2, 3]),
    ([3, 4, 2, 3], "Hello", [0, 0, 2, 3]),
    ([2, 3], "Hello", [2, 3]),
    ([], "", []),
])  # fmt: skip
def test_tokens_put_in_front_have_none_of_the_text(lengths: list[int], text: str, expected: list[int]) -> None:
    class Counting:
        def push(self, token: int) -> str:
            return "x" * token

        def finish(self) -> str:
            return ""

    assert lengths_in(text, lengths, Counting()) == expected


def test_a_stop_string_leaves_no_token_without_its_logprob(gateway: RunningGateway, ids: list[int]) -> None:
    params = {"max_new_tokens": 99, "stop": [ANSWER[3:6]]}
    body = {"text": "Say: ", "sampling_params": params, "return_logprob": True}
    made = httpx.post(f"{gateway.url}/generate", json=body).json()
    told = [token for _, token, _ in made["meta_info"]["output_token_logprobs"]]
    assert told == made["output_ids"] == ids[: len(told)]
    assert made["text"] == ANSWER[:3]


def test_completion_stream(client: openai.OpenAI, ids: list[int]) -> None:
    stream = client.completions.create(model="small", prompt="Say: ", echo=True, logprobs=1, max_tokens=99, stream=True)
    text, scores, offsets = "", list[float | None](), list[int]()
    for chunk in stream:
        (choice,) = chunk.choices
        text += choice.text
        if choice.logprobs is not None:
            scores += choice.logprobs.token_logprobs or []
            offsets += choice.logprobs.text_offset or []
    assert text == "Say: " + ANSWER
    assert scores[-len(ids) - 1 :] == pytest.approx([-token / 1000 for token in [*ids, 2]])
    assert offsets == sorted(offsets)


@pytest.mark.parametrize("stream", [False, True])
def test_the_token_that_ends_a_completion_has_its_logprob(
    gateway: RunningGateway, tokenizer: Tokenizer, stream: bool
) -> None:
    """lm-evaluation-harness asks so whether a text ends: with one token after it, whichever that is."""
    (verify,) = gateway.verify
    verify.say = lambda request, choice: [verify.eos]
    prompt, end = tokenizer.encode("Say: ", add_special_tokens=False).ids, tokenizer.id_to_token(verify.eos)
    body = {"prompt": "Say: ", "echo": True, "logprobs": 1, "max_tokens": 1}
    (text,), (told,), _ = completion(gateway, body, stream=stream)
    assert text == "Say: "
    assert [len(values) for values in told.values()] == [len(prompt) + 1] * 4
    assert (told["tokens"][-1], told["text_offset"][-1]) == (end, len(text)) == ("<|im_end|>", 5)
    assert told["token_logprobs"][-1] == told["top_logprobs"][-1][end] == pytest.approx(-verify.eos / 1000)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {}, {"max_tokens": 3}, {"n": 2}, {"n": 2, "prompt": ["Say: ", "é"]}, {"stop": ANSWER[3:6]}, {"stop": "o, 東"},
        {"stop": "🚀"}, {"stop": [ANSWER[-1], "never"]}, {"stop": ["." + "x" * 9]}, {"stop": "H"}, {"ignore_eos": True},
        {"stop_token_ids": [5], "min_tokens": 2}, {"skip_special_tokens": False},
    ],
)  # fmt: skip
def test_completions_tell_of_every_token_that_usage_counts(
    gateway: RunningGateway, fields: dict[str, Any], echo: bool, stream: bool
) -> None:
    body = {"prompt": "Say: ", "max_tokens": 99, "logprobs": 1, "echo": echo, **fields}
    texts, told, usage = completion(gateway, body, stream=stream)
    num_told = sum(len(one["tokens"]) for one in told)
    assert num_told == usage["completion_tokens"] + (usage["prompt_tokens"] * fields.get("n", 1) if echo else 0)
    for text, one in zip(texts, told, strict=True):
        assert {len(values) for values in one.values()} == {len(one["tokens"])}
        assert [*one["text_offset"], len(text)] == sorted([*one["text_offset"], len(text)])


def completion(
    gateway: RunningGateway, body: dict[str, Any], *, stream: bool
) -> tuple[list[str], list[dict[str, list[Any]]], dict[str, int]]:
    """Each choice's text and lists of log-probabilities, put together from a stream's chunks; the usage."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    reply = httpx.post(f"{gateway.url}/v1/completions", json={**body, **options})
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line] if stream else [reply.text]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    texts: defaultdict[int, str] = defaultdict(str)
    told: defaultdict[int, defaultdict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] += choice["text"]
        for name, values in choice["logprobs"].items():
            told[choice["index"]][name] += values
    return [texts[index] for index in sorted(texts)], [told[index] for index in sorted(told)], chunks[-1]["usage"]


def test_sglang(gateway: RunningGateway, ids: list[int]) -> None:
    body: dict[str, Any] = {
        "text": "Say: ", "sampling_params": {"max_new_tokens": 99}, "return_logprob": True, "top_logprobs_num": 2,
        "logprob_start_len": 1, "return_text_in_logprobs": True,
    }  # fmt: skip
    made = httpx.post(f"{gateway.url}/generate", json=body).json()
    meta = made["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == made["output_ids"] == [*ids, 2]
    assert meta["output_token_logprobs"][0] == [pytest.approx(-ids[0] / 1000), ids[0], "H"]
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * (len(ids) + 1)
    prompt = unpack_ids(gateway.verify[0].requests[-1].prompt_tokens, field="").tolist()
    assert [entry[1] for entry in meta["input_token_logprobs"]] == prompt[1:]
    assert len(meta["input_top_logprobs"]) == len(prompt) - 1
    body = {"text": ["a", "b"], "return_logprob": [True, False], "sampling_params": {"max_new_tokens": 0},
            "logprob_start_len": 0}  # fmt: skip
    first, second = httpx.post(f"{gateway.url}/generate", json=body).json()
    assert (first["text"], first["output_ids"], first["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert first["meta_info"]["input_token_logprobs"][0][0] is None
    assert first["meta_info"]["output_token_logprobs"] == []
    assert "output_token_logprobs" not in second["meta_info"]


def test_sglangs_streams_repeat_the_lists(gateway: RunningGateway) -> None:
    body: dict[str, Any] = {
        "text": "Say: ", "sampling_params": {"max_new_tokens": 99}, "return_logprob": True, "top_logprobs_num": 2,
        "logprob_start_len": 1,
    }  # fmt: skip
    whole = httpx.post(f"{gateway.url}/generate", json=body).json()["meta_info"]
    reply = httpx.post(f"{gateway.url}/generate", json={**body, "stream": True})
    metas = [json.loads(event.removeprefix("data: "))["meta_info"] for event in reply.text.split("\n\n")[:-2]]
    assert len(metas) > 2
    for name in ("output_token_logprobs", "output_top_logprobs"):
        assert all(meta[name] == whole[name][: len(meta[name])] for meta in metas)
        assert [len(metas[0][name]), metas[-1][name]] == [1, whole[name]]
    for name in ("input_token_logprobs", "input_top_logprobs"):
        assert all(meta[name] == whole[name] for meta in metas)


def test_trees_and_origins_in_a_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="small", messages=USER, stream=True,
        extra_body={"speculative": {"include_origins": True, "include_trees": True}},
    )  # fmt: skip
    told = [extra for chunk in stream if (extra := (chunk.model_extra or {}).get("outrider"))]
    tokens = [token for extra in told for token in extra.get("tokens", ())]
    trees = {extra["tree"]["step"]: extra["tree"] for extra in told if "tree" in extra}
    assert trees
    for token in tokens:
        assert (token["depth"] is not None) == (token["origin"] == "accepted")
        assert token["drafter"] == (None if token["origin"] == "target" else "NGRAM")
        if token["origin"] == "accepted":
            node = trees[token["step"]]["nodes"][token["depth"] - 1]
            assert (node["id"], node["accepted"]) == (token["id"], True)
    assert {node["accepted"] for tree in trees.values() for node in tree["nodes"]} == {True, False}
    assert all((tree["draft_us"], tree["verify_us"], tree["drafter"]) == (5, 7, "NGRAM") for tree in trees.values())


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_is_scored_once_for_all_its_choices(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    scored: list[str] = []

    def counting(text: str, *rest: Any) -> list[int]:
        scored.append(text)
        return lengths_in(text, *rest)

    monkeypatch.setattr("gateway.completions.lengths_in", counting)
    monkeypatch.setattr("gateway.offload.INLINE_BYTES", 200)  # so that a thread scores the second
    prompts = ["Say: ", "Say: " * 20]
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 2, "n": 3}
    gateway.verify[0].say = lambda request, choice: [50 + choice, 51]
    _, told, _ = completion(gateway, body, stream=stream)
    assert sorted(scored) == sorted(prompts)
    for same in (told[:3], told[3:]):
        for name in same[0]:
            assert same[0][name][:-2] == same[1][name][:-2] == same[2][name][:-2]
        assert len({one["tokens"][-2] for one in same}) == 3
        assert {one["token_logprobs"][0] for one in same} == {None}
