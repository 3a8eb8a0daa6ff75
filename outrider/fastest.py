"""What speculates with the embedded model where nobody says: the fastest, as `python -m bench.shipped` measured it."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.errors import StartupError

# Beside the heads that come with Outrider. Speed with each algorithm, as a multiple of the speed without drafts.
SPEEDS = Path(__file__).parent.parent / "engine" / "weights" / "speeds.json"
USUAL = "NGRAM"


def fastest_algorithm(path: Path = SPEEDS) -> str:
    """Its name; USUAL without a table. Raises StartupError for a damaged one."""
    if not path.is_file():
        return USUAL
    try:
        speeds: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))["speeds"]
        return max(speeds, key=lambda name: speeds[name])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"the table of measured speeds {path} is damaged: {error!r}") from error
