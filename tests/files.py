"""Files that change while somebody reads them, and folders of small ones."""

from __future__ import annotations

from pathlib import Path


def replace(path: Path, text: str) -> None:
    """Replaces a file by one that differs in more than its time, since clocks of files tick slowly."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def with_files(root: Path, texts: dict[str, str]) -> Path:
    """Writes these files with their texts below `root`, and returns `root`."""
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root
