"""A gateway with the playground in front of a verify service that drafts, and Chromium to look at it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import pytest
from playwright.sync_api import Browser
from tokenizers import Tokenizer

from tests.gateway.conftest import folder as folder
from tests.gateway.conftest import tokenizer as tokenizer
from tests.gateway.fakes import FakeVerify, RunningGateway, running
from tests.page.browser import Visit, chromium

ANSWER = "Hello <b>you</b>, the quick brown fox.\nHow are you today?"


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    """Chromium for a file's tests: while it runs, so does an event loop, and tests of other files want their own."""
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def shared(folder: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningGateway]:
    """A gateway without keys."""

    def fakes() -> list[FakeVerify]:
        return [FakeVerify(folder, vocab_size=tokenizer.get_vocab_size())]

    with running({"served_model_name": "small"}, fakes, tmp_path_factory.mktemp("sockets")) as gateway:
        yield gateway


Say = Callable[[str], Sequence[int]]


@pytest.fixture
def say(shared: RunningGateway, tokenizer: Tokenizer) -> Say:
    """Sets what the model answers from now on; gives its ids."""
    (verify,) = shared.verify

    def say(text: str) -> Sequence[int]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        verify.say = lambda request, choice: [*ids, verify.eos]
        return ids

    return say


@pytest.fixture
def gateway(shared: RunningGateway, say: Say) -> RunningGateway:
    """The shared gateway, which answers ANSWER."""
    shared.verify[0].reset()
    say(ANSWER)
    return shared


@pytest.fixture
def open_page(browser: Browser, gateway: RunningGateway) -> Generator[Callable[..., Visit]]:
    """Opens the page, of the shared gateway if no other address is given."""
    visits: list[Visit] = []

    def open_page(url: str = gateway.url, **context: object) -> Visit:
        visits.append(Visit(browser, url, **context))
        return visits[-1]

    yield open_page
    for visit in visits:
        visit.close()


@pytest.fixture
def visit(open_page: Callable[..., Visit]) -> Generator[Visit]:
    """The page of the shared gateway; nothing may go wrong in it."""
    visit = open_page()
    yield visit
    assert visit.problems == []
