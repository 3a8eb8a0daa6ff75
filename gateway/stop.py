"""Stop strings in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Lets text through up to the first stop string, whatever pieces it comes in.

    The stop string that is complete first wins, the longest of several that end together; neither it nor anything after
    it comes out. Text that may be the beginning of one is held back, and one that is complete with text that may not
    end anything is none.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_end: bool = True) -> str:
        """What of the text so far can be let out now. After a match, nothing. `may_end`: whether `text` may end it."""
        if self.matched is not None:
            return ""
        seen = len(self._held)
        text = self._held + text
        self._held = ""
        if may_end and (found := self._complete_after(seen, text)):
            end, self.matched = min(found, key=lambda pair: pair[0])
            return text[: end - len(self.matched)]
        start = self._possible_start(text)
        self._held = text[start:]
        return text[:start]

    def finish(self) -> str:
        """What was held back, when no text follows."""
        held, self._held = self._held, ""
        return held

    def _complete_after(self, seen: int, text: str) -> list[tuple[int, str]]:
        """Where each stop string is first complete that was not within the first `seen` characters."""
        starts = [(text.find(stop, max(0, seen + 1 - len(stop))), stop) for stop in self._stops]
        return [(start + len(stop), stop) for start, stop in starts if start >= 0]

    def _possible_start(self, text: str) -> int:
        """Where the longest tail begins that is the beginning of a stop string; the end when none is."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts:
                tail = text[start:]
                if any(stop != tail and stop.startswith(tail) for stop in self._stops):
                    return start
        return len(text)
