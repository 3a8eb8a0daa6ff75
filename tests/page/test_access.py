"""The playground for everyone: by keyboard, in both themes, on narrow screens, and what axe has to say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.gateway.fakes import RunningGateway
from tests.page.browser import Visit
from tests.page.conftest import ANSWER

NARROW = {"width": 320, "height": 640}
OpenPage = Callable[..., Visit]


def assert_no_violations(page: Page) -> None:
    results = Axe().run(page)
    assert results.violations_count == 0, results.generate_report()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(open_page: OpenPage, scheme: str) -> None:
    page = (visit := open_page(color_scheme=scheme)).page
    assert_no_violations(page)
    visit.ask("Hello?", mode="compare")
    visit.wait_done()
    page.locator("#step-back").click()
    page.get_by_role("treeitem").last.focus()
    page.evaluate("document.getElementById('key-form').hidden = false")
    page.evaluate("document.getElementById('error').textContent = 'Something went wrong.'")
    assert_no_violations(page)
    page.set_viewport_size({"width": 320, "height": 640})
    assert_no_violations(page)


def test_the_theme_is_switched_and_kept(open_page: OpenPage) -> None:
    page = open_page(color_scheme="light").page
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_label("Theme").select_option("dark")
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert page.evaluate(ground) == dark
    expect(page.get_by_label("Theme")).to_have_value("dark")
    page.get_by_label("Theme").select_option("auto")
    assert page.evaluate(ground) == light
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(ground) == dark


def test_a_narrow_screen_scrolls_one_way_only(open_page: OpenPage) -> None:
    page = (visit := open_page(viewport=NARROW)).page
    expect(page.locator("#settings-box")).not_to_have_attribute("open", "")
    visit.ask("A word that is " + "long" * 60, mode="compare")
    visit.wait_done()
    page.locator("#settings-box summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    first, second = page.locator(".answer").all()
    above, below = first.bounding_box(), second.bounding_box()
    assert above is not None
    assert below is not None
    assert below["y"] >= above["y"] + above["height"]  # the columns stand one above the other
    page.locator("#model").evaluate("model => model.textContent = 'a-model-of-some-length'")
    box = page.locator("#model").bounding_box()
    assert box is not None
    assert box["width"] >= NARROW["width"] / 2


def test_all_of_it_by_keyboard(gateway: RunningGateway, visit: Visit) -> None:
    page, keyboard = visit.page, visit.page.keyboard

    def tab_to(selector: str) -> None:
        for _ in range(60):
            if page.evaluate("selector => document.activeElement.matches(selector)", selector):
                return
            keyboard.press("Tab")
        raise AssertionError(f"Tab does not lead to {selector}")

    tab_to("input[name=mode]")
    keyboard.press("ArrowDown")
    keyboard.press("ArrowDown")
    tab_to("#prompt")
    keyboard.type("One line,")
    keyboard.press("Shift+Enter")
    keyboard.type("and another.")
    keyboard.press("Enter")
    visit.wait_done()
    expect(page.locator(".turn.user p")).to_have_text("One line,\nand another.")
    expect(page.locator(".note")).to_contain_text("identical")
    expect(page.get_by_label("Message")).to_be_focused()
    tab_to("#step")
    keyboard.press("ArrowLeft")
    expect(page.get_by_label("Newest")).not_to_be_checked()
    caption = page.locator("#tree-caption").text_content()
    tab_to("#step-on")
    keyboard.press("Enter")
    expect(page.locator("#tree-caption")).not_to_have_text(caption or "")
    expect(page.locator("#step-on")).to_be_focused()
    tab_to("[role=treeitem]")
    keyboard.press("Home")
    expect(page.locator("#node")).to_contain_text("committed before")
    keyboard.press("ArrowRight")
    expect(page.locator("#node")).to_contain_text("Draft rank")
    tab_to("summary")
    tab_to("[name=system]")
    keyboard.type("Be brief.")
    gateway.verify[0].hold_after = 1
    page.get_by_label("Message").focus()
    keyboard.type("Again?")
    tab_to("#send")
    keyboard.press("Enter")
    expect(page.locator("#stop")).to_be_focused()
    gateway.wait(gateway.verify[0].holding)
    keyboard.press("Enter")
    expect(page.get_by_role("status")).to_have_text("Stopped.")
    expect(page.get_by_label("Message")).to_be_focused()


def test_screen_readers_hear_when_an_answer_is_complete(gateway: RunningGateway, visit: Visit) -> None:
    page, (verify,) = visit.page, gateway.verify
    verify.hold_after = 2
    visit.ask("Hello?")
    gateway.wait(verify.holding)
    expect(page.locator(".answer")).to_have_attribute("aria-busy", "true")
    expect(page.get_by_role("status")).to_have_text("Answering…")
    gateway.set(verify.release)
    visit.wait_done()
    expect(page.locator(".answer")).to_have_attribute("aria-busy", "false")
    expect(page.get_by_role("status")).to_contain_text("tokens")
    expect(page.locator(".answer .text:not(.reasoning)")).to_have_text(ANSWER)
