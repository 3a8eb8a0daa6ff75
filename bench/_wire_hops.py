"""Where the time of a round goes: the moments that both processes of `bench wire` noted, put in order."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any

HOPS = ("commit", "wire_down", "take_in", "draft", "send", "wire_up", "match")
"""From a step's end to the next one's begin: the verdict made, its way, taken in, the trees drafted and packed, their
way, matched and laid out."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round of fresh drafts, in monotonic ns; draft_begin and draft_end: of the drafter's first and last step."""

    verify_end: int
    verdict_sent: int
    verdict_came: int
    draft_begin: int
    draft_end: int
    draft_busy: int  # of the steps between the two, alone
    proposal_sent: int
    proposal_came: int
    verify_begin: int

    def hops_ms(self) -> dict[str, float]:
        """Milliseconds by name of HOPS, and `draft_steps`, which is the part of `draft` that the network takes."""
        marks = (
            self.verify_end, self.verdict_sent, self.verdict_came, self.draft_begin, self.draft_end,
            self.proposal_sent, self.proposal_came, self.verify_begin,
        )  # fmt: skip
        hops = {name: (end - begin) / 1e6 for name, begin, end in zip(HOPS, marks[:-1], marks[1:], strict=True)}
        return hops | {"draft_steps": self.draft_busy / 1e6}


def rounds(verify: dict[str, Any], draft: dict[str, Any]) -> list[Round]:
    """The rounds whose tree was drafted after the verdict, from both processes' reports."""
    begins, ends = ([step[i] for step in verify["steps_ns"]] for i in (0, 1))
    draft_steps = draft["steps_ns"]
    draft_begins = [step[0] for step in draft_steps]
    found: list[Round] = []
    for round_key, came, frame_key, sent in draft["trips"]:
        verdict_sent, proposal_came = verify["sent_ns"].get(round_key), verify["came_ns"].get(frame_key)
        if verdict_sent is None or proposal_came is None:
            continue
        ended, began = bisect.bisect_right(ends, verdict_sent) - 1, bisect.bisect_left(begins, proposal_came)
        first, last = bisect.bisect_left(draft_begins, came), bisect.bisect_left(draft_begins, sent)
        if ended < 0 or began >= len(begins) or first >= last:
            continue
        own = draft_steps[first:last]
        busy = sum(end - begin for begin, end in own)
        marks = (ends[ended], verdict_sent, came, own[0][0], own[-1][1])
        found.append(Round(*marks, busy, sent, proposal_came, begins[began]))
    return found
