"""A verify service of which a part hangs ends, so that its answers can go on elsewhere."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from outrider.rpc import create_channel
from outrider.sampling import SamplingParams
from outrider.v1 import verify_pb2, verify_pb2_grpc
from outrider.wire import pack_ids
from tests.e2e.cluster import VERIFY_FLAGS
from tests.e2e.small_model import write_small_model

SCRIPT = """
import sys, threading
from outrider.cli import main
from verify_service.calls import Calls
from verify_service.step_loop import StepLoop

def hang(*_, **__):
    threading.Event().wait()

{place} = hang
sys.exit(main(sys.argv[1:]))
"""


async def ask(address: str) -> grpc.StatusCode | None:
    """The status that a request ends with."""
    request = verify_pb2.GenerateRequest(
        prompt_tokens=pack_ids([1, 2, 3]), sampling=SamplingParams(max_tokens=4).to_proto()
    )
    async with create_channel(address) as channel:
        call = verify_pb2_grpc.VerifyServiceStub(channel).Generate(request, wait_for_ready=True, timeout=200)
        return await call.code()


@pytest.mark.parametrize("place", ["StepLoop._run", "Calls.begin"])
def test_what_hangs_ends(place: str, tmp_path: Path) -> None:
    model, listen = write_small_model(tmp_path / "model"), f"unix:{tmp_path}/verify.sock"
    words = ("verify", f"--listen={listen}", f"--model-path={model}", "--watchdog-timeout=1", *VERIFY_FLAGS)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(place=place), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    try:
        assert asyncio.run(ask(listen)) is grpc.StatusCode.UNAVAILABLE
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1
    assert "no progress: this process ends" in output
    assert "in hang" in output
