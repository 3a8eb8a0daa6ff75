"""A few rounds of `bench wire` as a picture: what each process did when, one after the other and with overlap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench._output import writing
from bench._plot import pyplot
from bench._wire_run import Played

_LANES = ("verify: step", "verify: commit, match", "wire", "drafter")
_COLOURS = {
    "verify": "#3b6ea5", "commit": "#7f9fc4", "match": "#9fbfd9", "wait": "#e8e4da", "verdict": "#b07aa1",
    "fresh proposal": "#e0922f", "early proposal": "#f2c57c", "draft": "#5a9e6f",
}  # fmt: skip
_NUM_STEPS = 5  # shown
_NS_PER_MS = 1e6

Bar = tuple[str, str, float, float]
"""Lane, kind (a key of _COLOURS), begin and end in ns."""


def bars(played: Played) -> list[Bar]:
    """What happened during some verify steps in the middle of a run of one session."""
    verify, draft = played.verify, played.draft
    steps = verify["steps_ns"]
    middle = len(steps) // 2
    shown = steps[middle : middle + _NUM_STEPS]
    found: list[Bar] = []
    for (begin, end), following in zip(shown, [*shown[1:], None], strict=True):
        found.append((_LANES[0], "verify", begin, end))
        if following is not None:
            found += _between(verify, end, following[0])
    first, last = shown[0][0], shown[-1][1]
    found += [(_LANES[3], "draft", begin, end) for begin, end in draft["steps_ns"] if first <= begin < last]
    for key, came in draft["rounds_came"].items():
        found += _flight("verdict", verify["sent_ns"].get(key), came, first, last)
    for key, (sent, is_early) in draft["frames_sent"].items():
        kind = "early proposal" if is_early else "fresh proposal"
        found += _flight(kind, sent, verify["came_ns"].get(key), first, last)
    return found


def _between(verify: dict[str, Any], end: float, begin: float) -> list[Bar]:
    """Bars from a step's end to the next one's begin: commit, the wait for a proposal if any, and matching."""
    sent = [ns for ns in verify["sent_ns"].values() if end <= ns < begin]
    if not sent:  # the next step began at once, and the verdict went out beside it
        return [(_LANES[1], "commit", end, begin)]
    came = [ns for ns in verify["came_ns"].values() if sent[0] <= ns < begin]
    waited = [(_LANES[1], "wait", sent[0], came[-1]), (_LANES[1], "match", came[-1], begin)] if came else []
    return [(_LANES[1], "commit", end, sent[0]), *waited]


def _flight(kind: str, sent: float | None, came: float | None, first: float, last: float) -> list[Bar]:
    return [(_LANES[2], kind, sent, came)] if sent is not None and came is not None and first <= sent < last else []


def draw(runs: dict[str, Played], path: Path) -> None:
    """Writes the picture, in the format that the path's ending names; one panel for each run."""
    plt = pyplot("--picture")
    from matplotlib.patches import Rectangle

    figure, panels = plt.subplots(len(runs), 1, figsize=(11, 2.1 * len(runs) + 0.6), sharex=True, squeeze=False)
    for panel, (title, played) in zip(panels[:, 0], runs.items(), strict=True):
        found = bars(played)
        start = min(begin for _, _, begin, _ in found)
        for lane, kind, begin, end in found:
            panel.barh(
                _LANES.index(lane), (end - begin) / _NS_PER_MS, left=(begin - start) / _NS_PER_MS, height=0.7,
                color=_COLOURS[kind], edgecolor="white", linewidth=0.4,
            )  # fmt: skip
        panel.set_yticks(range(len(_LANES)), _LANES, fontsize=8)
        panel.invert_yaxis()
        panel.set_title(title, fontsize=9, loc="left")
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("ms", fontsize=8)
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in _COLOURS.values()]
    figure.legend(handles, _COLOURS.keys(), loc="lower center", ncols=len(_COLOURS), fontsize=7, frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    with writing(path):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
