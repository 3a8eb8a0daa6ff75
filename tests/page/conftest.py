"""A gateway with the playground in front of a verify service that drafts, and Chromium to look at it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Error, Page, sync_playwright
from tokenizers import Tokenizer

from tests.gateway import models
from tests.gateway.fakes import FakeVerify, RunningGateway, running

ANSWER = "Hello <b>you</b>, the quick brown fox.\nHow are you today?"
# Debian's has its own name; elsewhere it may be called otherwise.
_NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a small byte-level tokenizer and ChatML."""
    return models.write_folder(tmp_path_factory.mktemp("model"), models.byte_level())


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of `folder`."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def browser() -> Generator[Browser]:
    """Chromium without a window."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("there is no Chromium (Debian: apt-get install chromium)")
    # Its own sandbox does not work for root.
    args = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=args)
        except Error as error:
            pytest.skip(f"Chromium does not start: {error.message.splitlines()[0]}")
        yield browser
        browser.close()


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


class Visit:
    """The page in a context of its own. Whatever it fetches, logs or fails at is noted."""

    def __init__(self, browser: Browser, url: str, **context: object) -> None:
        self._context = browser.new_context(reduced_motion="reduce", **context)  # type: ignore[arg-type]
        self.page: Page = self._context.new_page()
        self.page.set_default_timeout(10_000)
        self.requested: list[str] = []
        self.problems: list[str] = []
        self.page.on("request", lambda request: self.requested.append(request.url))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)
        self.page.goto(url)

    def ask(self, text: str, mode: str = "on") -> None:
        """Sends a message."""
        self.page.locator(f"input[name=mode][value={mode}]").check()
        self.page.get_by_label("Message").fill(text)
        self.page.get_by_role("button", name="Send").click()

    def wait_done(self) -> None:
        """Returns when the answer is complete."""
        self.page.locator("#send:enabled").wait_for()

    def close(self) -> None:
        """Forgets all of it."""
        self._context.close()


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
