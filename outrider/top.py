"""`outrider top`: what verify and draft services are doing at the moment, from their metrics, in a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from outrider import env
from outrider.args.top import TopArgs
from outrider.errors import OutriderError, StartupError, Unavailable
from outrider.scrape import Scrape, Span, fetch
from outrider.top_frame import fitted, frame, is_draft, is_verify

_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"

Fetch = Callable[[str, float], Scrape]


def main(args: TopArgs) -> int:
    """Shows frames until Ctrl-C, or one with --once: then 1 where one did not answer, 2 where one is no service."""
    if sys.stdout is None:
        raise StartupError("stdout is closed")
    live = sys.stdout.isatty() and not args.once and not env.dumb_terminal()
    view = View(args.metrics)
    view.look()
    while True:
        time.sleep(args.interval_s)
        lines = view.look()
        if not live:
            print("\n".join(lines), flush=True)
        else:
            columns, rows = os.get_terminal_size(sys.stdout.fileno())  # 0 where it does not say
            lines = fitted(lines, columns or sys.maxsize, (rows or sys.maxsize) - 1)  # the cursor has a line as well
            print(_HOME + "".join(f"{line}{_CLEAR_LINE}\n" for line in lines) + _CLEAR_BELOW, end="", flush=True)
        if args.once:
            return 1 if view.failed else 2 if view.strangers else 0


class View:
    """Looks at all processes again and again. `failed`: those that did not answer last time, and why; `strangers`:
    those that answered as neither of our services."""

    def __init__(
        self, urls: Sequence[str], fetch: Fetch = fetch, clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        self.failed: dict[str, OutriderError] = {}
        self.strangers: list[str] = []
        self._urls = list(dict.fromkeys(urls))
        self._fetch = fetch
        self._clock = clock
        self._before: dict[str, Scrape] = {}

    def look(self) -> list[str]:
        """Asks every process; the lines to show of those that were seen before too."""
        with ThreadPoolExecutor(len(self._urls)) as pool:
            found = dict(zip(self._urls, pool.map(self._try, self._urls), strict=True))
        self.failed = {url: error for url, error in found.items() if isinstance(error, OutriderError)}
        scrapes = {url: scrape for url, scrape in found.items() if isinstance(scrape, Scrape)}
        spans = {url: Span(self._before[url], scrape) for url, scrape in scrapes.items() if url in self._before}
        self._before = scrapes
        self.strangers = [url for url, scrape in scrapes.items() if not (is_verify(scrape) or is_draft(scrape))]
        return frame(spans, {url: error.message for url, error in self.failed.items()})

    def _try(self, url: str) -> Scrape | Unavailable:
        try:
            return self._fetch(url, self._clock())
        except Unavailable as error:
            return error
