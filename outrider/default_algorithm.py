"""What speculates with the embedded model where nobody says: the fastest, as `python -m bench.shipped` measured it."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.errors import StartupError

# Beside the heads that come with Outrider. Speed with each algorithm, as a multiple of the speed without drafts.
SPEEDS = Path(__file__).parent.parent / "engine" / "weights" / "speeds.json"
USUAL = "NGRAM"


def section(*, quantized: bool) -> str:
    """Where the table has the speeds beside a target as it is, or a quantised one."""
    return "quantized" if quantized else "as_it_is"


def fastest_algorithm(*, quantized: bool, path: Path = SPEEDS) -> str:
    """The fastest algorithm measured for the embedded model; USUAL without a table. StartupError for a damaged one.

    quantized: for a quantised target, whose steps are shorter: a draft must be cheaper to pay.
    """
    if not path.is_file():
        return USUAL
    try:
        tables = json.loads(path.read_text(encoding="utf-8"))
        name = section(quantized=quantized)
        speeds: dict[str, float] = tables[name]["speeds"] if name in tables else {USUAL: 1.0}
        return max(speeds, key=lambda name: speeds[name])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"the table of measured speeds {path} is damaged: {error!r}") from error
