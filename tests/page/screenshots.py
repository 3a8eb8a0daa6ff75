"""Takes docs/images anew: `python -m tests.page.screenshots URL`, where `outrider serve` runs."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page

from outrider.demo import PROMPT
from tests.page.browser import chromium

IMAGES = Path(__file__).parents[2] / "docs" / "images"
NUM_COLOURS = 128  # enough for a page of flat colours, and a third of the bytes
LONG_MS = 300_000  # two answers on a busy machine
POEM = "Write a short poem about the sea."


def save(page: Page, name: str) -> None:
    """One picture, with few colours."""
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(NUM_COLOURS)
    picture.save(IMAGES / name, optimize=True)


def ask(page: Page, prompt: str, mode: str) -> None:
    """Has a prompt answered."""
    page.locator(f"input[name=mode][value={mode}]").check()
    page.get_by_label("Message").fill(prompt)
    page.get_by_role("button", name="Send").click()
    page.locator("#send:enabled").wait_for(timeout=LONG_MS)


def most_interesting_step(page: Page) -> None:
    """Goes to the newest step with accepted and rejected nodes, else to the newest, and looks at the last of them."""
    page.locator("#step").focus()
    page.keyboard.press("End")
    for _ in range(int(page.locator("#step").get_attribute("max") or 0)):
        if page.locator(".node.accepted").count() > 1 and page.locator(".node.rejected").count():
            break
        page.keyboard.press("ArrowLeft")
    else:
        page.keyboard.press("End")
    page.locator(".node:is(.accepted, .rejected)").last.focus()
    page.locator("#inspector").evaluate("inspector => inspector.scrollTop = 0")


def take(browser: Browser, url: str) -> None:
    """All the pictures."""
    IMAGES.mkdir(exist_ok=True)
    shots = (("playground.png", "light", PROMPT, "compare"), ("playground-dark.png", "dark", POEM, "on"))
    for name, theme, prompt, mode in shots:
        page = browser.new_page(viewport={"width": 1360, "height": 860}, reduced_motion="reduce")
        page.goto(url)
        page.get_by_label("Theme").select_option(theme)
        ask(page, prompt, mode)
        most_interesting_step(page)
        save(page, name)
        page.close()


if __name__ == "__main__":
    with chromium() as browser:
        take(browser, sys.argv[1])
