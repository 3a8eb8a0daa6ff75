"""Structured output through HTTP: what comes out matches, with drafts on and off alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.reference import prompt_ids
from tests.e2e.stack import Stack, serve

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPT = "Describe a person as JSON with name, age and tags."


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """A server in fp32, so that answers can be compared."""
    flags = ("--dtype=float32", "--context-length=1024", "--max-total-tokens=4096", "--page-size=16")
    with serve(*flags, "--disable-speculation-brake") as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0, 1])
def test_json_schema_through_the_openai_client(stack: Stack, temperature: float) -> None:
    def ask(*, speculate: bool) -> str:
        answer = stack.openai.chat.completions.create(
            model=stack.openai.models.list().data[0].id,
            messages=[{"role": "user", "content": PROMPT}],
            temperature=temperature, seed=3, max_tokens=120,
            response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
            extra_body={"speculative": {"enabled": speculate}},
        )  # fmt: skip
        assert answer.choices[0].finish_reason == "stop"
        if speculate and temperature == 0:
            accepted.append(answer.usage.model_extra["speculation"]["accepted_tokens"])  # type: ignore[union-attr, index]
        return answer.choices[0].message.content or ""

    accepted: list[int] = []
    plain = ask(speculate=False)
    person = json.loads(plain)
    assert set(person) == {"name", "age", "tags"}
    assert 0 <= person["age"] <= 150
    assert set(person["tags"]) <= {"red", "green", "blue"}
    assert [ask(speculate=True) for _ in range(4)] == [plain] * 4
    assert temperature or max(accepted) > 5  # drafts go on inside a grammar; on a busy machine some come late


@pytest.mark.slow
@pytest.mark.parametrize("min_tokens", [0, 20])
@pytest.mark.parametrize(
    ("answer", "constraint"),
    [
        ("555-1234", {"regex": "555-1234"}),
        ("555-1234", {"regex": "[0-9]{3}-[0-9]{4,6}"}),
        ("yes", {"ebnf": 'root ::= "yes" | "no"'}),
        (
            '{"capital": "Paris"}',
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "city",
                        "schema": {
                            "type": "object", "properties": {"capital": {"type": "string"}}, "required": ["capital"],
                            "additionalProperties": False,
                        },
                    },
                }
            },
        ),
    ],
)  # fmt: skip
def test_drafts_may_go_past_the_end(stack: Stack, answer: str, constraint: dict[str, Any], min_tokens: int) -> None:
    """If the conversation holds the answer, the text after it there is drafted too."""
    question, given = {"role": "user", "content": "And in short?"}, {"role": "assistant", "content": answer}
    body = {
        "messages": [question, given] * 2 + [question],
        "temperature": 0,
        "max_tokens": 40,
        "min_tokens": min_tokens,
    }

    def ask(**speculative: Any) -> str:
        response = stack.http.post("/v1/chat/completions", json={**body, **constraint, "speculative": speculative})
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]["content"]

    plain = ask(enabled=False)
    assert [ask() for _ in range(2)] == [plain] * 2
    assert [ask(num_steps=5, topk=4, num_draft_tokens=32) for _ in range(2)] == [plain] * 2


@pytest.mark.slow
def test_regex_and_ebnf(stack: Stack) -> None:
    ids = prompt_ids("When was the war?")
    year = stack.generate(ids, regex="In (19|20)[0-9]{2}\\.", temperature=0, max_new_tokens=20)
    assert year["text"][:3] == "In "
    assert len(year["text"]) == 8
    assert year["meta_info"]["finish_reason"]["type"] == "stop"
    word = stack.generate(ids, ebnf='root ::= "yes" | "no"', temperature=0, max_new_tokens=20)
    assert word["text"] in ("yes", "no")


@pytest.mark.slow
def test_bad_schema_is_refused(stack: Stack) -> None:
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "shape"}}},
    }
    response = stack.http.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "response_format", "invalid_json_schema")


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_without_an_end_is_no_finished_answer(stack: Stack, stream: bool) -> None:
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    body = {
        "messages": [{"role": "user", "content": PROMPT}], "stream": stream, "max_tokens": 40,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": endless}},
    }  # fmt: skip
    response = stack.http.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "response_format", "invalid_json_schema")


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_the_request_itself_leaves_nothing_is_its_fault(stack: Stack, stream: bool) -> None:
    """A request is at fault if all that may follow would end the answer, and it is not to end yet."""
    digits = stack.http.post("/tokenize", json={"prompt": "7", "add_special_tokens": False}).json()["tokens"]
    body = {
        "prompt": "Seven:", "stream": stream, "max_tokens": 9, "regex": "7{5}", "stop_token_ids": digits,
        "min_tokens": 4,
    }  # fmt: skip
    response = stack.http.post("/v1/completions", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == "invalid_grammar"
    assert "min_tokens" in response.json()["error"]["message"]
