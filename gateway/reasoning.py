"""Reasoning apart from the answer: what a model writes between its marks for thinking.

`--reasoning-parser` names the marks. Whether the output begins inside is read off the prompt, because templates may
open the mark (or open and close it, where thinking is switched off); else it is the model's habit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gateway.message_parts import Content, Part, PartParser, Reasoning, split_at, taken
from outrider.errors import StartupError


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks, and whether output begins inside when the prompt shows neither."""

    begin: str
    end: str
    begins_inside: bool = False

    @property
    def markers(self) -> frozenset[str]:
        """Strings that must come out of the detokenizer, control tokens though they may be."""
        return frozenset((self.begin, self.end))

    def starts_inside(self, prompt: str, continued: str = "") -> bool:
        """Whether the output that follows `prompt` is reasoning from the start.

        continued: the answer's beginning, where the prompt ends in one: its last mark says it.
        """
        last_begin, last_end = continued.rfind(self.begin), continued.rfind(self.end)
        if last_begin != last_end:
            return last_begin > last_end
        tail = prompt[-200:].rstrip()
        if tail.endswith(self.begin):
            return True
        return self.begins_inside and not tail.endswith(self.end)


_THINK = ReasoningFormat("<think>", "</think>")
_FORMATS = {
    "deepseek-r1": ReasoningFormat("<think>", "</think>", begins_inside=True),
    "deepseek-v3": _THINK,
    "qwen3": _THINK,
    "qwen3-thinking": ReasoningFormat("<think>", "</think>", begins_inside=True),
    "glm45": _THINK,
    "step3": ReasoningFormat("<think>", "</think>", begins_inside=True),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
}
NAMES = tuple(_FORMATS)


def reasoning_format(name: str | None) -> ReasoningFormat | None:
    """The format by its name, in which - and _ are the same. StartupError for one that is not known."""
    if name is None:
        return None
    found = _FORMATS.get(name.replace("_", "-").lower())
    if found is None:
        raise StartupError(f"--reasoning-parser is {name!r}; it must be one of {', '.join(NAMES)}")
    return found


class ReasoningParser:
    """Gives reasoning as such, and everything after it to the next parser (None: it is content)."""

    def __init__(self, form: ReasoningFormat, inner: PartParser | None, *, inside: bool) -> None:
        self._form = form
        self._inner = inner
        self._state = "inside" if inside else "before"
        self._space: list[str] = []  # white space that nothing has come after
        self._held = ""  # what may begin a mark
        self._trim = inside  # white space around reasoning, and before the answer, is the format's
        self._fresh = inside  # nothing of it has come: the model may open the mark itself, though it is open

    @property
    def inside(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._state == "inside"

    def push(self, text: str) -> Iterator[Part]:
        """Parts as they become certain."""
        text = self._held + text
        self._held = ""
        if self._state == "before" or self._fresh:
            text = self._enter(text)
            if self._held:
                return
        if self._state == "inside":
            before, found, text = split_at(text, self._form.end)
            yield from self._reason(before)
            if not found:
                self._held = text
                return
            self._state, self._trim = "after", True
            self._space.clear()
        if self._state == "after":
            yield from self._pass(text)

    def finish(self) -> Iterator[Part]:
        """What may have been the beginning of a mark was none."""
        held, self._held = taken(self._space) + self._held, ""
        if self._state == "inside":
            held = held.lstrip() if self._trim else held
            if held:
                yield Reasoning(held)
        elif held:
            yield from self._pass(held)
        if self._inner is not None:
            yield from self._inner.finish()

    def _enter(self, text: str) -> str:
        """Finds out whether the output opens the mark, by its first characters that are no white space; what is left to
        read."""
        stripped = text.lstrip()
        begin = self._form.begin
        self._space.append(text[: len(text) - len(stripped)])
        if stripped.startswith(begin):
            self._space.clear()
            self._state, self._trim, self._fresh = "inside", True, False
            return stripped[len(begin) :]
        if begin.startswith(stripped):  # also when nothing but white space has come
            self._held = stripped
            return ""
        self._state, self._fresh = ("inside" if self._fresh else "after"), False
        return taken(self._space) + stripped

    def _reason(self, text: str) -> Iterator[Part]:
        """Reasoning, but for white space at its beginning and at its end."""
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        kept = text.rstrip()
        if kept:
            yield Reasoning(taken(self._space) + kept)
        self._space.append(text[len(kept) :])

    def _pass(self, text: str) -> Iterator[Part]:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        if not text:
            return
        if self._inner is not None:
            yield from self._inner.push(text)
        else:
            yield Content(text)
