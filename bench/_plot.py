"""Pictures of figures, by matplotlib where it is installed. The suffix of a `path` says the format."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

from bench._figures import Figures
from bench._output import writing
from outrider.errors import StartupError

_PANEL = (5, 4)  # inches


def plot_loads(path: Path, rows: Mapping[str, Sequence[Figures]], title: str) -> None:
    """Total and per-stream tokens/s over the load, a line for each system."""
    by_rate = any(row.request_rate for figures in rows.values() for row in figures)
    ticks = sorted({row.concurrency or row.request_rate or 0 for figures in rows.values() for row in figures})
    with _picture(path, 2, title) as (picture, (total, stream)):
        for index, (name, figures) in enumerate(rows.items()):
            look = _look(index, name)
            loads = [row.concurrency or row.request_rate for row in figures]
            total.plot(loads, [row.total_tokens_per_s for row in figures], **look)
            stream.plot(loads, [row.decode_tokens_per_s for row in figures], **look)
        for axes, label in ((total, "tokens/s in all"), (stream, "decode tokens/s a stream")):
            _scale(axes, ticks, "requests a second" if by_rate else "requests at once")
            axes.set(ylabel=label, ylim=(0, None))
        picture.legend(*total.get_legend_handles_labels(), loc="outside right", fontsize="small")


def plot_parts(
    path: Path, steps: Mapping[int, Mapping[str, float]], products_ms: Mapping[int, float], title: str
) -> None:
    """Milliseconds of a step by its tokens, part upon part; a line at 1.25 times the products, which they should stay
    below."""
    names = list(next(iter(steps.values())))
    with _picture(path, 1, title, width=1.5) as (picture, (axes,)):
        places, below = range(len(steps)), [0.0] * len(steps)
        for name in names:
            heights = [parts[name] for parts in steps.values()]
            axes.bar(places, heights, bottom=below, label=name.replace("_", " "))
            below = [low + height for low, height in zip(below, heights, strict=True)]
        for place, count in zip(places, steps, strict=True):
            label = "1.25 times products" if place == 0 else None
            axes.hlines(1.25 * products_ms[count], place - 0.45, place + 0.45, "black", "dashed", label=label)
        axes.set_xticks(places, [str(count) for count in steps])
        axes.set(xlabel="tokens of a step", ylabel="ms")
        picture.legend(loc="outside right", fontsize="small")


def plot_grid(path: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Plots `bench speculative`: a stream's tokens/s by draft tokens, a line for each depth and breadth, a panel
    for each number of streams; dashed: no speculation."""
    batches = sorted({row["batch_size"] for row in rows})
    with _picture(path, len(batches), title) as (picture, panels):
        drafting = sorted((row for row in rows if row["num_draft_tokens"]), key=itemgetter("num_draft_tokens"))
        shapes = sorted({(row["steps"], row["topk"]) for row in drafting})
        ticks = sorted({row["num_draft_tokens"] for row in drafting})
        for axes, batch in zip(panels, batches, strict=True):
            for row in rows:
                if row["batch_size"] == batch and not row["num_draft_tokens"]:
                    axes.axhline(row["speed"], color="black", linestyle="dashed", label="no speculation")
            for index, (steps, topk) in enumerate(shapes):
                label = f"{_count(steps, 'step')}, topk {topk}" if steps else "drafts"
                line = [
                    row for row in drafting if (row["batch_size"], row["steps"], row["topk"]) == (batch, steps, topk)
                ]
                tokens, speeds = ([row[name] for row in line] for name in ("num_draft_tokens", "speed"))
                axes.plot(tokens, speeds, **_look(index, label))
            if ticks:
                _scale(axes, ticks, "draft tokens")
            axes.set(title=_count(batch, "stream"), ylabel="tokens/s a stream", ylim=(0, None))
        picture.legend(*panels[0].get_legend_handles_labels(), loc="outside right", fontsize="small")


def plot_goodput(path: Path, batches: Mapping[str, Mapping[str, Any]], plain: str, title: str) -> None:
    """Plots `bench goodput`: tokens/s over those without speculation by the number of streams, a line for each way;
    bars reach from the least to the most of the turns."""
    ticks = sorted(map(int, batches))
    with _picture(path, 1, title, width=1.5) as (picture, (axes,)):
        axes.axhline(1.0, color="black", linestyle="dashed", label=plain)
        for name in (way for way in next(iter(batches.values())) if way != plain):
            over = [batches[str(tick)][name]["over_plain"] for tick in ticks]
            medians = [one["median"] for one in over]
            reach = [[one["median"] - one["least"] for one in over], [one["most"] - one["median"] for one in over]]
            axes.errorbar(ticks, medians, yerr=reach, marker="o", capsize=3, label=name)
        _scale(axes, ticks, "streams")
        axes.set(ylabel="tokens/s over no speculation", ylim=(0, None))
        picture.legend(loc="outside right", fontsize="small")


def check_plot(path: Path | None, output: Path | None, flag: str = "--plot") -> None:
    """StartupError before anything is measured where `flag` asks for a picture that cannot be made, or for one in the
    file of the figures."""
    if path is not None:
        if output is not None and os.path.realpath(path) == os.path.realpath(output):
            raise StartupError(f"--output and {flag} are the same file, {path}")
        if path.suffix not in (".png", ".svg", ".pdf"):
            raise StartupError(f"{flag} writes .png, .svg or .pdf, not {path.name}")
        pyplot(flag)


@contextmanager
def _picture(path: Path, panels: int, title: str, width: float = 1.0) -> Iterator[tuple[Any, Sequence[Any]]]:
    """A figure and its axes side by side, written at the end. width: of a panel, in usual ones."""
    plt = pyplot()
    size = (_PANEL[0] * width * panels, _PANEL[1])
    picture, axes = plt.subplots(1, panels, figsize=size, layout="constrained", squeeze=False)
    for one in axes[0]:
        one.grid(alpha=0.3)
    try:
        yield picture, axes[0]
        picture.suptitle(title)
        with writing(path):
            picture.savefig(path, dpi=120)
    finally:
        plt.close(picture)


def _look(index: int, label: str) -> dict[str, Any]:
    """Colour, marker and label of line number `index`."""
    return {"color": f"C{index % 10}", "marker": "osD^"[index // 10 % 4], "label": label}


def _scale(axes: Any, ticks: Sequence[float], label: str) -> None:
    """Doublings at equal distances."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set(xlabel=label)


def _count(number: int, of_what: str) -> str:
    return f"{number} {of_what}" if number == 1 else f"{number} {of_what}s"


def pyplot(flag: str = "--plot") -> Any:
    """matplotlib.pyplot, which draws into files only. StartupError where it is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise StartupError(f"{flag} needs matplotlib: in a checkout, pip install '.[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt
