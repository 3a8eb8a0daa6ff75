"""Pictures of figures, by matplotlib where it is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench._figures import Figures
from outrider.errors import StartupError


def plot(path: Path, rows: Mapping[str, Sequence[Figures]], title: str) -> None:
    """Total and per-stream tokens/s over the load, a line for each system. The suffix of `path` says the format."""
    pyplot = _pyplot()
    picture, (total, stream) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for index, (name, figures) in enumerate(rows.items()):
        look: dict[str, Any] = {"color": f"C{index % 10}", "marker": "osD^"[index // 10 % 4], "label": name}
        loads = [row.concurrency or row.request_rate for row in figures]
        total.plot(loads, [row.total_tokens_per_s for row in figures], **look)
        stream.plot(loads, [row.decode_tokens_per_s for row in figures], **look)
    by_rate = any(row.request_rate for figures in rows.values() for row in figures)
    ticks = sorted({row.concurrency or row.request_rate or 0 for figures in rows.values() for row in figures})
    for axes, label in ((total, "tokens/s in all"), (stream, "decode tokens/s a stream")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set(xlabel="requests a second" if by_rate else "requests at once", ylabel=label, ylim=(0, None))
        axes.grid(alpha=0.3)
    picture.legend(*total.get_legend_handles_labels(), loc="outside right", fontsize="small")
    picture.suptitle(title)
    picture.savefig(path, dpi=120)
    pyplot.close(picture)


def check_plot(path: Path | None) -> None:
    """StartupError before anything is measured where a picture is asked for and cannot be made."""
    if path is not None:
        if path.suffix not in (".png", ".svg", ".pdf"):
            raise StartupError(f"--plot writes .png, .svg or .pdf, not {path.name}")
        _pyplot()


def _pyplot() -> Any:
    """matplotlib.pyplot, which draws into files only."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise StartupError("--plot needs matplotlib: pip install 'outrider[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
