"""Model folders for the gateway's tests, and a gateway that a file's tests share."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import openai
import pytest
from tokenizers import Tokenizer

from tests.gateway import models
from tests.gateway.compiling import Grammars
from tests.gateway.fakes import FakeVerify, RunningGateway, running

ANSWER = "Hello, 東京! 👩‍🚀 naïve."


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a small byte-level tokenizer and ChatML."""
    return models.write_folder(tmp_path_factory.mktemp("model"), models.byte_level())


@pytest.fixture(scope="session")
def embedded_folder() -> Path:
    """The folder of the embedded default model."""
    from engine.model_folder import resolve_model

    return resolve_model(None)


@pytest.fixture(scope="module")
def grammars(embedded_folder: Path) -> Grammars:
    """Compiles grammars for the embedded model."""
    return Grammars(embedded_folder)


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of `folder`."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def shared(folder: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningGateway]:
    """A gateway in front of one fake."""

    def fakes() -> list[FakeVerify]:
        return [FakeVerify(folder, vocab_size=tokenizer.get_vocab_size() + 8)]

    args = {"served_model_name": "small", "max_body_bytes": 2**20}
    with running(args, fakes, tmp_path_factory.mktemp("sockets")) as gateway:
        yield gateway


@pytest.fixture
def gateway(shared: RunningGateway, tokenizer: Tokenizer) -> RunningGateway:
    """The shared gateway with a verify service that says ANSWER and then ends."""
    (verify,) = shared.verify
    answer = [*tokenizer.encode(ANSWER, add_special_tokens=False).ids, verify.eos]
    verify.say = lambda request, choice: answer
    verify.reset()
    return shared


@pytest.fixture
def hurried(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> Generator[RunningGateway]:
    """A gateway that gives a request's headers a second, and its body another; verify says ANSWER."""
    answer = [*tokenizer.encode(ANSWER, add_special_tokens=False).ids, 2]
    verify = FakeVerify(folder, tokenizer.get_vocab_size(), say=lambda request, choice: answer)
    with running({"receive_timeout_s": 1.0}, lambda: [verify], tmp_path) as gateway:
        yield gateway


@pytest.fixture
def client(gateway: RunningGateway) -> Generator[openai.OpenAI]:
    """The official client, which tries nothing twice."""
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client
