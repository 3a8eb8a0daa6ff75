"""Chromium for the tests of the playground, and one visit to the page."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Generator

import pytest
from playwright.sync_api import Browser, Error, Page, expect, sync_playwright

# Debian's has its own name; elsewhere it may be called otherwise.
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_PATIENCE_MS = 60_000  # a busy machine may take longer than Playwright's five seconds
expect.set_options(timeout=_PATIENCE_MS)


@contextlib.contextmanager
def chromium() -> Generator[Browser]:
    """The installed Chromium, without a window. Skips the test where there is none, or where it does not start."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("there is no Chromium (Debian: apt-get install chromium)")
    args = ["--no-sandbox"] if os.geteuid() == 0 else []  # its own sandbox does not work for root
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=args)
        except Error as error:
            pytest.skip(f"Chromium does not start: {error.message.splitlines()[0]}")
        with browser:
            yield browser


class Visit:
    """The page in a context of its own. Whatever it fetches, logs or fails at is noted."""

    def __init__(self, browser: Browser, url: str, **context: object) -> None:
        self._context = browser.new_context(reduced_motion="reduce", **context)  # type: ignore[arg-type]
        self.page: Page = self._context.new_page()
        self.page.set_default_timeout(_PATIENCE_MS)
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
