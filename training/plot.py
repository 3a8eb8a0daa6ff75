"""Accept length against tokens seen, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def plot(history: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """One line for each accept length in the rows of `history`, whose `seen` is how many tokens were seen."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(name for row in history for name in row if name not in ("seen", "loss")):
        rows = [row for row in history if name in row]
        axes.plot([row["seen"] / 1e6 for row in rows], [row[name] for row in rows], marker=".", label=name)
    axes.set_xlabel("tokens seen, millions")
    axes.set_ylabel("accept length")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, format="png")
