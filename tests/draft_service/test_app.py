"""The draft process, started and stopped as a process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from draft_service.app import cache_kernels, main
from outrider.args import DraftArgs
from outrider.errors import StartupError
from outrider.v1 import verify_pb2 as pb
from tests.draft_service.fake_verify import FakeVerify, opened

ROOT = Path(__file__).parents[2]
RUN = """
import sys
from draft_service.app import main
from outrider.args import DraftArgs
sys.exit(main(DraftArgs.parse(sys.argv[1:])))
"""
# Kept between runs, so that only the first one compiles.
ENVIRONMENT = os.environ | {"OUTRIDER_HOME": str(ROOT / ".cache" / "tests")}


@pytest.mark.asyncio
async def test_it_serves_drains_on_sigterm_and_exits_with_0(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/verify.sock"
    async with FakeVerify(address) as verify:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", RUN, f"--listen=unix:{tmp_path}/draft.sock", f"--verify-address={address}",
            stdout=asyncio.subprocess.PIPE, cwd=ROOT, env=ENVIRONMENT,
        )  # fmt: skip
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert line == f"draft serves NGRAM at unix:{tmp_path}/draft.sock for {address}\n"
        stream = await verify.stream()
        assert str(process.pid) in stream.enlist.drafter_id
        stream.tell(opened=[opened(1, [1, 2, 3, 1, 2], prompt_len=1)])
        await stream.proposals()
        process.send_signal(signal.SIGTERM)
        (release,) = await stream.releases()
        assert release.reason == pb.RELEASE_REASON_DRAINING
        assert await process.wait() == 0


def test_a_taken_address_stops_it_with_a_message(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, "--listen=no.such.host.invalid:1"],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "StartupError: cannot listen on no.such.host.invalid:1" in done.stderr


def test_an_algorithm_that_it_has_not_is_refused() -> None:
    with pytest.raises(StartupError, match="--speculative-algorithm"):
        main(DraftArgs(speculative_algorithm="NONE"))


def test_an_unwritable_home_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="OUTRIDER_HOME"):
        cache_kernels(tmp_path / "file" / "numba")


def test_it_imports_no_torch() -> None:
    code = "import sys, draft_service.app, draft_service.service; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
