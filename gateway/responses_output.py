"""The items of a response as they grow, and the events that tell of them."""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, Literal

from msgspec import UNSET

from gateway.logprobs import PieceOf, TokenLogprob, chat_logprobs
from gateway.message_parts import CallArguments, CallBegin, Part, Reasoning
from gateway.responses_schemas import (
    FunctionCallItem,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from gateway.responses_tools import Namespaced
from gateway.text_stream import Piece
from gateway.tool_parsers.scanner import is_whole

Event = dict[str, Any]
Status = Literal["completed", "incomplete"]


class Transcript:
    """Takes the parts of one answer; `items` are what it has so far."""

    def __init__(
        self, piece_of: PieceOf, *, logprobs: bool, namespaced: Mapping[str, Namespaced] | None = None
    ) -> None:
        """`namespaced` has what clients know a function by, where that is not its name before the model."""
        self.items: list[OutputItem] = []
        self._piece_of = piece_of
        self._namespaced = namespaced or {}
        self._logprobs = logprobs
        self._pieces: deque[Piece] = deque()  # whose log-probabilities wait for text
        self._num_new = 0  # of them came last
        self._open: OutputItem | None = None
        self._text: list[str] = []

    def tokens(self, pieces: list[Piece]) -> None:
        """Takes in the tokens of the parts that come next."""
        if self._logprobs:
            self._pieces += pieces
            self._num_new = len(pieces)

    def add(self, part: Part, call_id: str) -> Iterator[Event]:
        """The events of one part. `call_id` names the call that it begins."""
        if isinstance(part, CallBegin):
            yield from self.close()
            namespace, name = self._namespaced.get(part.name, (UNSET, part.name))
            yield from self._begin(FunctionCallItem(
                id=_id("fc"), call_id=call_id, name=name, arguments="", status="in_progress", namespace=namespace
            ))  # fmt: skip
            return
        if isinstance(part, CallArguments):
            kind = "response.function_call_arguments"
            self._pass(part.text)
        elif isinstance(part, Reasoning):
            kind = "response.reasoning_text"
            yield from self._switch(ReasoningItem)
            self._pass(part.text)
        else:
            kind = "response.output_text"
            if not isinstance(self._open, OutputMessage):
                self._drop(self._place_of(part.text))  # marks, and white space that is the format's
            yield from self._switch(OutputMessage)
        self._text.append(part.text)
        event = {"type": f"{kind}.delta", **self._place(kind), "delta": part.text}
        if isinstance(self._open, OutputMessage):
            event["logprobs"] = self._take_logprobs(self._open, part.text)
        yield event

    def finish(self, status: Status) -> Iterator[Event]:
        """Ends the answer. One that has nothing has a message without text: clients look at the first item."""
        if not self.items:
            yield from self._switch(OutputMessage)
        yield from self.close(status)

    def close(self, status: Status = "completed") -> Iterator[Event]:
        """Ends the item that is open."""
        item = self._open
        if item is None:
            return
        text = "".join(self._text)
        item.status = status
        if isinstance(item, FunctionCallItem):
            item.arguments = text
            item.status = status if is_whole(text) else "incomplete"
            kind = "response.function_call_arguments"
            yield {"type": f"{kind}.done", **self._place(kind), "name": item.name, "arguments": text}
        else:
            part = item.content[0]
            part.text = text
            kind = "response.output_text" if isinstance(item, OutputMessage) else "response.reasoning_text"
            done: Event = {"type": f"{kind}.done", **self._place(kind), "text": text}
            if isinstance(part, OutputText):
                done["logprobs"] = part.logprobs
            yield done
            yield {"type": "response.content_part.done", **self._place(kind), "part": part}
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}
        self._open, self._text = None, []

    def _switch(self, kind: type[OutputMessage] | type[ReasoningItem]) -> Iterator[Event]:
        """Ends what is open, and begins an item of this kind, unless one is open."""
        if isinstance(self._open, kind):
            return
        yield from self.close()
        if kind is OutputMessage:
            yield from self._begin(OutputMessage(id=_id("msg"), content=[], status="in_progress"))
        else:
            yield from self._begin(ReasoningItem(id=_id("rs"), content=[], status="in_progress"))

    def _begin(self, item: OutputItem) -> Iterator[Event]:
        self.items.append(item)
        self._open, self._text = item, []
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": item}
        if isinstance(item, OutputMessage):
            item.content.append(OutputText(text="", annotations=[], logprobs=[]))
        elif isinstance(item, ReasoningItem):
            item.content.append(ReasoningText(text=""))
        else:
            return
        yield {"type": "response.content_part.added", **self._place("content"), "part": item.content[0]}

    def _place(self, kind: str) -> Event:
        assert self._open is not None
        place: Event = {"item_id": self._open.id, "output_index": len(self.items) - 1}
        if kind != "response.function_call_arguments":
            place["content_index"] = 0
        return place

    def _pass(self, text: str) -> None:
        """Passes over text that is no message's: its tokens are not told."""
        if (place := self._place_of(text)) >= 0:
            self._drop(place + len(text))
            return
        while len(self._pieces) > self._num_new:  # what a parser wrote in its own words ended in what came last
            self._pieces.popleft()

    def _place_of(self, text: str) -> int:
        """Where `text` begins in that of the waiting pieces: if it can, with one of them or after white space, for it
        may be within a mark too. -1: nowhere."""
        waiting = "".join(piece.text for piece in self._pieces)
        begins = set(accumulate((len(piece.text) for piece in self._pieces), initial=0))
        first = place = waiting.find(text)
        while place >= 0 and place not in begins and not waiting[place - 1].isspace():
            place = waiting.find(text, place + 1)
        return first if place < 0 else place

    def _drop(self, size: int) -> None:
        """Drops the pieces within the first `size` characters; one without text stays with the next that has some."""
        while size > 0 and len(self._pieces[0].text) <= size:
            size -= len(self._pieces.popleft().text)

    def _take_logprobs(self, item: OutputMessage, text: str) -> list[TokenLogprob]:
        """The log-probabilities of the pieces up to the end of `text`, where that can be told."""
        place = self._place_of(text)
        left = math.inf if place < 0 else place + len(text)
        pieces: list[Piece] = []
        while self._pieces and (left > 0 or not self._pieces[0].text):
            pieces.append(self._pieces.popleft())
            left -= len(pieces[-1].text)
        made = chat_logprobs(pieces, self._piece_of).content
        item.content[0].logprobs += made
        return made


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
