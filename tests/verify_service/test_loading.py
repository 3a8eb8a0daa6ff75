"""What a process cannot load ends it in one line that names the flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.args import VerifyArgs
from outrider.errors import StartupError
from tests.e2e.small_model import write_small_model
from verify_service.app import load_engine


@pytest.mark.parametrize("limit", ["max_running_requests", "max_verify_nodes"])
def test_limits_that_no_memory_holds(tmp_path: Path, limit: str) -> None:
    write_small_model(tmp_path)
    huge: dict[str, Any] = {limit: 2**31 - 1}
    args = VerifyArgs(model_path=str(tmp_path), device="cpu", threads=1, max_total_tokens=64, **huge)
    with pytest.raises(StartupError, match=f"no memory for .*--{limit.replace('_', '-')} 2147483647"):
        load_engine(args)
