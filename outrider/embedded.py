"""Where the embedded model is kept. Knows nothing of how it comes there (engine/embedded.py)."""

from __future__ import annotations

import tempfile
from pathlib import Path

from outrider import env
from outrider.errors import StartupError
from outrider.model_name import EMBEDDED

ELSEWHERE = "set OUTRIDER_HOME to another folder, or give --model-path"


def embedded_folder() -> Path:
    """The embedded model's folder, which its first use makes. StartupError where it is not there and cannot be."""
    folder = env.home() / "models" / EMBEDDED.lower()
    try:
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder.parent).close()
    except OSError as error:
        raise unwritable(folder, error) from error
    return folder


def unwritable(folder: Path, error: OSError) -> StartupError:
    """What is said of a folder for the embedded model that cannot be made."""
    return StartupError(f"the embedded model cannot be written below {folder.parent}: {error}; {ELSEWHERE}")
