"""The playground when things go wrong, and what its files are served with."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect
from tokenizers import Tokenizer

from gateway import page as page_files
from outrider.errors import ResourceExhausted, Unavailable
from tests.gateway.fakes import FakeVerify, RunningGateway, running
from tests.page.browser import Visit
from tests.page.conftest import ANSWER

KEY = "sk-test"
OpenPage = Callable[..., Visit]


@pytest.fixture
def locked(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> Generator[RunningGateway]:
    """A gateway that asks for a key."""

    def fakes() -> list[FakeVerify]:
        ids = [*tokenizer.encode(ANSWER, add_special_tokens=False).ids, 2]
        return [FakeVerify(folder, vocab_size=tokenizer.get_vocab_size(), say=lambda request, choice: ids)]

    with running({"api_key": (KEY,), "requests_per_minute": 2}, fakes, tmp_path) as gateway:
        yield gateway


def test_a_key_is_asked_for_and_limits_are_told(open_page: OpenPage, locked: RunningGateway) -> None:
    visit = open_page(locked.url)
    page = visit.page
    field = page.get_by_label("API key")
    expect(field).to_be_focused()
    page.keyboard.type("sk-wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("The server does not know this API key.")
    expect(field).to_be_focused()
    field.fill(KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#key-form")).to_be_hidden()
    expect(page.get_by_role("alert")).to_be_empty()
    for count in (1, 2):
        visit.ask("Hello?")
        visit.wait_done()
        expect(page.locator(".answer")).to_have_count(count)
    visit.ask("And again?")
    visit.wait_done()
    expect(page.get_by_role("alert")).to_contain_text("The rate limit of 2 requests a minute is reached. Try again in ")
    # Nothing came of it: the question is where it was, and the conversation as it was.
    expect(page.get_by_label("Message")).to_have_value("And again?")
    expect(page.locator(".answer")).to_have_count(2)
    page.reload()
    expect(page.locator("#model")).not_to_have_text("…")
    expect(page.locator("#key-form")).to_be_hidden()


def test_a_key_that_no_header_holds_is_told(open_page: OpenPage, locked: RunningGateway) -> None:
    page = open_page(locked.url).page
    page.get_by_label("API key").fill("ключ")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("This is no API key")


def test_a_server_that_is_not_ready_is_waited_for(open_page: OpenPage, locked: RunningGateway) -> None:
    visit = open_page(locked.url)
    page, header = visit.page, visit.page.locator("#model")
    error = {"error": {"message": "The model is being loaded."}}
    page.route("**/v1/models", lambda route: route.fulfill(status=503, headers={"retry-after": "0.1"}, json=error))
    page.get_by_label("API key").fill(KEY)
    page.keyboard.press("Enter")
    expect(header).to_have_text("The model is being loaded.")
    page.unroute("**/v1/models")
    expect(header).to_have_text(locked.verify[0].folder.name)
    expect(page.locator("#key-form")).to_be_hidden()
    page.reload()
    expect(header).to_have_text(locked.verify[0].folder.name)


def test_a_full_server_is_told(gateway: RunningGateway, open_page: OpenPage) -> None:
    visit = open_page()
    gateway.verify[0].refuse = ResourceExhausted("The queue is full.", retry_after_s=3)
    visit.ask("Hello?")
    visit.wait_done()
    expect(visit.page.get_by_role("alert")).to_contain_text("Try again in ")
    gateway.verify[0].refuse = None
    visit.page.keyboard.press("Enter")
    visit.wait_done()
    expect(visit.page.get_by_role("alert")).to_be_empty()
    expect(visit.page.locator(".answer .text:not(.reasoning)")).to_have_text(ANSWER)


def test_a_refused_setting_is_told(visit: Visit) -> None:
    visit.page.locator("[name=stop]").fill("1\n2\n3\n4\n5")
    visit.ask("Hello?")
    visit.wait_done()
    expect(visit.page.get_by_role("alert")).not_to_be_empty()
    visit.problems.clear()  # Chromium's own line about the status 400


def test_an_error_halfway_is_told_and_keeps_what_came(gateway: RunningGateway, visit: Visit) -> None:
    page, (verify,) = visit.page, gateway.verify
    verify.hold_after, verify.break_after = 2, [3]
    visit.ask("Hello?")
    gateway.wait(verify.holding)
    verify.refuse = Unavailable("gone for good")
    gateway.set(verify.release)
    visit.wait_done()
    expect(page.get_by_role("alert")).not_to_be_empty()
    expect(page.locator(".answer .token")).to_have_count(7)
    expect(page.locator(".answer")).to_have_attribute("aria-busy", "false")
    expect(page.get_by_label("Message")).to_have_value("")


def test_a_server_that_is_gone_is_told(open_page: OpenPage) -> None:
    visit = open_page()
    visit.page.route("**/v1/chat/completions", lambda route: route.abort())
    visit.ask("Hello?")
    visit.wait_done()
    expect(visit.page.get_by_role("alert")).to_have_text("The server cannot be reached.")
    expect(visit.page.get_by_label("Message")).to_have_value("Hello?")


MODELS, API = "**/v1/models", "**/v1/**"


@pytest.fixture
def outdated(gateway: RunningGateway, open_page: OpenPage) -> Visit:
    """The page as it was when the server had another model; /v1/models says that still."""
    visit = open_page("about:blank")
    visit.page.route(MODELS, lambda route: route.fulfill(json={"data": [{"id": "another"}]}))
    visit.page.goto(gateway.url)
    expect(visit.page.locator("#model")).to_have_text("another")
    return visit


def test_a_model_that_is_not_served_any_more_is_told_or_replaced(outdated: Visit) -> None:
    page = outdated.page
    outdated.ask("Hello?")
    outdated.wait_done()
    expect(page.get_by_role("alert")).to_have_text('The model "another" does not exist; small does.')
    page.unroute(MODELS)
    page.keyboard.press("Enter")
    outdated.wait_done()
    expect(page.locator("#model")).to_have_text("small")
    expect(page.get_by_role("alert")).to_be_empty()
    expect(page.locator(".turn.user")).to_have_count(1)
    expect(page.locator(".answer .text:not(.reasoning)")).to_have_text(ANSWER)


@pytest.mark.parametrize("loads", [False, True])
def test_a_server_that_comes_back_with_another_model(outdated: Visit, loads: bool) -> None:
    page, error = outdated.page, {"error": {"message": "The model is being loaded."}}
    page.route(API, lambda route: route.fulfill(status=503, json=error) if loads else route.abort())
    outdated.ask("Hello?")
    outdated.wait_done()
    told = "The model is being loaded." if loads else "The server cannot be reached."
    expect(page.get_by_role("alert")).to_have_text(told)
    expect(page.locator("#model")).to_have_text(told)
    page.unroute(MODELS)
    page.unroute(API)
    expect(page.locator("#model")).to_have_text("small")
    expect(page.get_by_role("status")).to_have_text("The server now serves small.")
    page.keyboard.press("Enter")
    outdated.wait_done()
    expect(page.locator(".answer .text:not(.reasoning)")).to_have_text(ANSWER)


def test_reasoning_is_shown_apart(open_page: OpenPage) -> None:
    token = '{"id": 5, "text": "Hm.", "origin": "target", "step": 0, "depth": null, "drafter": null}'
    events = (
        f'data: {{"choices": [{{"delta": {{"reasoning_content": "Hm."}}}}], "outrider": {{"tokens": [{token}]}}}}\n\n'
        'data: {"choices": [{"delta": {"content": "Yes."}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    )
    visit = open_page()
    visit.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=events),
    )
    visit.ask("Hello?")
    visit.wait_done()
    expect(visit.page.locator(".reasoning")).to_have_text("Hm.")
    expect(visit.page.locator(".answer .text:not(.reasoning)")).to_have_text("Yes.")


def test_files_come_with_a_strict_policy_and_without_a_key(locked: RunningGateway) -> None:
    assert {"/", "/page/main.js", "/page/style.css", "/page/theme.js", "/page/icon.svg"} <= page_files.PATHS
    with httpx.Client(base_url=locked.url) as client:
        for path in page_files.PATHS:
            response = client.get(path)
            assert response.status_code == 200
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
            again = client.get(path, headers={"if-none-match": response.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert client.head("/").status_code == 200
        assert client.post("/").status_code == 405
        assert client.get("/page/..%2fpage.py").status_code in (401, 404)
        total = sum(len(client.get(path).content) for path in page_files.PATHS)
    assert total < 64 * 1024  # a page that loads at once, and is read in one sitting
