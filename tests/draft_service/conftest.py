"""What several files' tests need."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def address(tmp_path: Path) -> str:
    """Where a verify service may listen."""
    return f"unix:{tmp_path}/verify.sock"
