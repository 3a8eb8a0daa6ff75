"""The pictures of the playground in docs/images: `python -m tests.page.screenshots URL`, with `outrider serve` at URL."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

IMAGES = Path(__file__).parents[2] / "docs" / "images"
NUM_COLOURS = 128  # enough for a page of flat colours, and a third of the bytes
LONG_MS = 300_000  # two answers on a busy machine
PROMPT = (
    "Copy this list three times, without changes:\n"
    "1. Read the prompt\n2. Draft a tree of tokens\n3. Verify the tree in one pass\n4. Keep what the target agrees with"
)


def save(page: Page, name: str) -> None:
    """One picture, with few colours."""
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(NUM_COLOURS)
    picture.save(IMAGES / name, optimize=True)


def ask(page: Page, mode: str) -> None:
    """Has PROMPT answered."""
    page.locator(f"input[name=mode][value={mode}]").check()
    page.get_by_label("Message").fill(PROMPT)
    page.get_by_role("button", name="Send").click()
    page.locator("#send:enabled").wait_for(timeout=LONG_MS)


def most_interesting_step(page: Page) -> None:
    """Goes to the newest step with accepted and rejected nodes, and looks at a rejected one."""
    page.locator("#step").focus()
    page.keyboard.press("End")
    for _ in range(int(page.locator("#step").get_attribute("max") or 0)):
        if page.locator(".node.accepted").count() and page.locator(".node.rejected").count():
            break
        page.keyboard.press("ArrowLeft")
    page.locator(".node.rejected, .node.root").last.hover()


def take(browser: Browser, url: str) -> None:
    """All the pictures."""
    IMAGES.mkdir(exist_ok=True)
    for name, scheme, mode in (("playground.png", "light", "compare"), ("playground-dark.png", "dark", "on")):
        page = browser.new_page(viewport={"width": 1360, "height": 860}, color_scheme=scheme, reduced_motion="reduce")
        page.goto(url)
        ask(page, mode)
        most_interesting_step(page)
        save(page, name)
        page.close()


if __name__ == "__main__":
    with sync_playwright() as playwright:
        path = shutil.which("chromium")
        take(playwright.chromium.launch(executable_path=path, args=["--no-sandbox"]), sys.argv[1])
