"""Random requests through HTTP: with drafts and without, whole and streamed, many at once, the answer is the same."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.e2e.asking import CHAT, COMPLETIONS, NATIVE, SCHEMA, Question, Said, ask
from tests.e2e.stack import serve

NUM_REQUESTS = 24
AT_ONCE = 6
PROMPTS = [
    "Count from one to twenty in words, separated by commas.",
    "Write a short poem about the sea and repeat its first line at the end.",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
    "What is the capital of France, and why?",
    "one two three one two three one two three one",
    "Explain photosynthesis to a child.",
]
FORMATS: list[dict[str, Any]] = [
    {},
    {},
    {},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}},
    {"regex": "(one|two|three)( (one|two|three)){4,20}"},
]


def request(number: int) -> Question:
    """A request of any kind; the same number always gives the same request."""
    rng = random.Random(number)
    body: dict[str, Any] = {"temperature": rng.choice([0, 0, 0.5, 1.0, 1.4]), "top_p": rng.choice([1.0, 0.9, 0.5])}
    optional = {
        "top_k": lambda: rng.choice([1, 5, 40]),
        "min_p": lambda: 0.05,
        "frequency_penalty": lambda: rng.choice([-0.5, 0.7]),
        "presence_penalty": lambda: rng.choice([-0.3, 0.5]),
        "repetition_penalty": lambda: 1.2,
        "logit_bias": lambda: {str(rng.randrange(1000, 9000)): rng.choice([-100, 3])},
        "stop": lambda: rng.choice([[", ten"], ["the ", "\n\n"], ["never said"]]),
    }
    body |= {name: make() for name, make in optional.items() if rng.random() < 0.25}
    max_tokens, least = rng.choice([1, 2, 17, 48]), rng.choice([0, 0, 5])
    fixed = rng.choice([{}, {}, {"num_steps": 1}, {"num_steps": 5, "topk": 3, "num_draft_tokens": 12}])
    text, form, kind = rng.choice(PROMPTS), rng.choice(FORMATS), rng.choice([CHAT, COMPLETIONS, NATIVE])
    shared = {"ignore_eos": rng.random() < 0.3, "speculative": {"enabled": True, **fixed}}
    if kind == NATIVE:
        rules = {"regex": form["regex"]} if "regex" in form else {}
        sampling = {
            **body, **rules, "max_new_tokens": max_tokens, "min_new_tokens": min(least, max_tokens),
            "sampling_seed": number, "ignore_eos": shared["ignore_eos"],
        }  # fmt: skip
        return Question(str(number), kind, {"text": text, "sampling_params": sampling, "speculative": fixed})
    body |= {"max_tokens": max_tokens, "min_tokens": min(least, max_tokens), "seed": number, **form, **shared}
    if kind == COMPLETIONS:
        return Question(str(number), kind, {**body, "prompt": text, "echo": not form and rng.random() < 0.2})
    if rng.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": rng.choice([0, 2])}
    return Question(str(number), kind, {**body, "n": rng.choice([1, 1, 2]), "messages": [_turn(text)]})


def ways(question: Question) -> list[Question]:
    """The ways to ask: without drafts; with them, whole and streamed."""
    plain = {**question.body, "speculative": {"enabled": False}}
    streamed = {**question.body, "stream": True}
    if question.path != NATIVE:
        streamed["stream_options"] = {"include_usage": True}
    return [replace(question, body=body) for body in (plain, question.body, streamed)]


async def _answers(url: str) -> dict[int, list[Said]]:
    turn = asyncio.Semaphore(AT_ONCE)

    async with httpx.AsyncClient(base_url=url, timeout=300.0) as client:

        async def answer(number: int) -> tuple[int, list[Said]]:
            async with turn:
                return number, await asyncio.gather(*(ask(client, way) for way in ways(request(number))))

        return dict(await asyncio.gather(*map(answer, range(NUM_REQUESTS))))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--quantization=int8_dynamic", "--page-size=16")], ids=["bf16", "int8_dynamic"])
def test_random_requests_get_the_answers_of_plain_decoding(flags: tuple[str, ...]) -> None:
    words = ("--speculative-algorithm=EAGLE3", "--context-length=1024", "--max-total-tokens=4096", *flags)
    with serve(*words, "--disable-speculation-brake") as stack:
        found = asyncio.run(_answers(stack.url))
        (state,) = stack.http.get("/get_server_info").json()["internal_states"]
    for number, (plain, *others) in found.items():
        for other in others:
            assert other == plain, request(number)
    assert state["spec_num_correct_drafts"] > 20  # drafts really carried the answers


def _turn(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
