"""The guides: README, CONTRIBUTING, the pages of docs/ and the READMEs of folders.

Lines have at most 120 characters but for pictures, tables and code. The benchmarks' pages, which are figures above all,
and the records of docs/decisions/ have lines of any length.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_imports import ROOT

PAGES = sorted(path for path in (ROOT / "docs").glob("*.md") if not path.name.startswith("benchmarks"))
GUIDES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md")), *PAGES, *ROOT.glob("*/README.md")]
MOST_CHARACTERS = 120


def lines_of_text(page: Path) -> list[tuple[int, str]]:
    """Numbers and lines of a page without its pictures, tables and code."""
    found: list[tuple[int, str]] = []
    in_code = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not line.lstrip().startswith(("|", "![", "[![")):
            found.append((number, line))
    return found


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_guides_are_of_bounded_length(page: Path) -> None:
    assert [(number, line) for number, line in lines_of_text(page) if len(line) > MOST_CHARACTERS] == []
