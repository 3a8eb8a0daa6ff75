"""generation_config.json's sampling values: which count, on which routes, and how they are told."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from gateway.sampling_defaults import read_defaults
from outrider.v1 import common_pb2
from tests.gateway import models
from tests.gateway.fakes import FakeVerify, RunningGateway, running

CONFIG = {"temperature": 0.5, "top_p": 0.75, "top_k": 20, "min_p": 0.125, "repetition_penalty": 1.25}
ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi!"}]},
    "/v1/completions": {"prompt": "Hi!"},
    "/v1/responses": {"input": "Hi!"},
    "/generate": {"text": "Hi!"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose makers say how it is to be sampled."""
    folder = models.write_folder(tmp_path_factory.mktemp("sampled"), models.byte_level())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "do_sample": True, **CONFIG}))
    return folder


@pytest.fixture(scope="module", params=["model", "openai"])
def gateways(
    request: pytest.FixtureRequest, model: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[tuple[RunningGateway, dict[str, Any]]]:
    """One with each switch, whose tokenizer lies elsewhere; and what it should put in."""
    args = {"sampling_defaults": request.param, "tokenizer_path": str(folder)}
    with running(args, lambda: [FakeVerify(model, vocab_size=410)], tmp_path_factory.mktemp("sockets")) as gateway:
        yield gateway, CONFIG if request.param == "model" else {}


def sent(gateway: RunningGateway) -> common_pb2.SamplingParams:
    """What verify was asked last, without what every request has."""
    sampling = common_pb2.SamplingParams()
    sampling.CopyFrom(gateway.verify[0].requests[-1].sampling)
    for name in ("seed", "max_tokens", "min_tokens", "presence_penalty", "frequency_penalty"):
        sampling.ClearField(name)
    return sampling


OPENAI = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.mark.parametrize("path", ROUTES)
def test_they_stand_for_what_a_request_leaves_out(gateways: tuple[RunningGateway, dict[str, Any]], path: str) -> None:
    gateway, defaults = gateways
    asked = {"temperature": 0, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    if path == "/v1/responses":
        asked = {"temperature": 0}
    for given in ({}, asked):
        fields = {"sampling_params": given} if path == "/generate" else given
        reply = httpx.post(gateway.url + path, json={**ROUTES[path], **fields})
        assert reply.status_code == 200, reply.text
        expected = {**OPENAI, **defaults, **given, **({"top_k": 0} if "top_k" in given else {})}
        assert sent(gateway) == common_pb2.SamplingParams(**expected)
        if path == "/v1/responses":
            assert (reply.json()["temperature"], reply.json()["top_p"]) == (expected["temperature"], expected["top_p"])


def test_they_are_told(gateways: tuple[RunningGateway, dict[str, Any]]) -> None:
    gateway, defaults = gateways
    told = httpx.get(f"{gateway.url}/get_model_info").json()["preferred_sampling_params"]
    assert told == (defaults or None)
    settings = httpx.get(f"{gateway.url}/get_server_info").json()
    assert settings["sampling_defaults"] == ("model" if defaults else "openai")


def test_a_value_that_no_request_may_have_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": NaN, "top_p": "0.8", "top_k": 1.5, "min_p": null, "repetition_penalty": 1.125, "num_beams": 4}'
    )
    with capture_logs() as logs:
        assert read_defaults(tmp_path / "absent", tmp_path) == {"repetition_penalty": 1.125}
    assert [line["field"] for line in logs] == ["temperature", "top_p", "top_k"]
