"""The OpenAPI document, and bodies made from it, right and wrong: no 5xx, and every answer is as the document says."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from gateway import page
from gateway.app import ROUTES
from gateway.openapi import document
from tests.gateway.fakes import RunningGateway

DOCUMENT = schemathesis.openapi.from_dict(json.loads(document()))
OPERATIONS = [
    (method, path) for path, methods in json.loads(document())["paths"].items() for method in methods
]  # fmt: skip
CHECKS = [not_a_server_error, response_schema_conformance, status_code_conformance, content_type_conformance]


@pytest.fixture(scope="module")
def session() -> Generator[requests.Session]:
    """The client that schemathesis knows."""
    with requests.Session() as session:
        yield session


def test_every_route_is_described(gateway: RunningGateway) -> None:
    described = {(path.replace("{model}", "{model:path}"), method.upper()) for method, path in OPERATIONS}
    known = {(route.path, method) for route in ROUTES if isinstance(route, Route) for method in route.methods or ()}
    assert described <= known
    assert {path for path, _ in known} - {path for path, _ in described} == {"/openapi.json"} | page.PATHS
    assert httpx.get(f"{gateway.url}/openapi.json").json() == json.loads(document())


SERVED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/generate": {"text": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
REFUSED = frozenset(
    [
        "functions",
        "function_call",
        "modalities",
        "audio",
        "web_search_options",
        "suffix",
        "best_of",
        "image_data",
        "token_ids_logprob",
        "background",
        "previous_response_id",
        "conversation",
        "prompt_template",
        "truncation",
        "include",
        "model",
        "regex",
        "ebnf",
    ]
)


def _make_servable(body: dict[str, Any]) -> None:
    """Takes out what is refused whatever else is there, so that the rest is looked at."""
    for name in REFUSED & body.keys():
        del body[name]
    body.update(_with_whole_numbers(body))
    body["n"] = 1
    if "input" in body:
        body.pop("prompt", None)
    if not body.get("stream"):
        body.pop("stream_options", None)
    if "sampling_params" in body or "input_ids" in body:
        body.pop("input_ids" if body.get("text") else "text", None)
    for message in body.get("messages") or ():
        if message["role"] == "tool" or not isinstance(message.get("content"), str):
            message.update(role="user", content="x", tool_calls=None)


def _with_whole_numbers(value: Any) -> Any:
    """JSON schema takes 1.0 for an integer; this server does not."""
    if isinstance(value, dict):
        return {key: _with_whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(_with_whole_numbers, value))
    return int(value) if isinstance(value, float) and value.is_integer() else value


@pytest.mark.parametrize("path", [path for method, path in OPERATIONS if DOCUMENT[path][method.upper()].body])
def test_a_plain_body_is_served_as_described(gateway: RunningGateway, session: requests.Session, path: str) -> None:
    """All bodies that are made from the document may be refused; this one is not."""
    case = DOCUMENT[path]["POST"].Case(body=SERVED[path], media_type="application/json")
    reply = case.call_and_validate(base_url=gateway.url, session=session, checks=CHECKS, timeout=30)
    assert reply.status_code == 200


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_nothing_breaks_it(
    gateway: RunningGateway, session: requests.Session, method: str, path: str, mode: GenerationMode
) -> None:
    operation = DOCUMENT[path][method.upper()]
    if not operation.body and mode is GenerationMode.NEGATIVE:
        return  # nothing can be wrong with it

    @settings(
        max_examples=15 if operation.body else 3, deadline=None, derandomize=True, database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            _make_servable(case.body)
        case.call_and_validate(base_url=gateway.url, session=session, checks=CHECKS, timeout=30)

    check()
