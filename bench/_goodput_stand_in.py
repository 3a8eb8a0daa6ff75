"""The services of `bench goodput --stand-in`: as they are, over the scripted networks of `bench wire`.

    python -m bench._goodput_stand_in verify ADDRESS SETTING
    python -m bench._goodput_stand_in draft ADDRESS SETTING

A step of the target takes verify_ms and ROW_MS for each of its rows; the drafter's are chains. Ends on SIGTERM.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import torch
import uvloop

from bench._wire_clock import Clock
from bench._wire_draft import ScriptedModel, make_drafter
from bench._wire_script import Setting
from bench._wire_verify import AUX_LAYERS, ScriptedRunner
from draft_service.drafters.shape import CHAIN, TreeShape
from draft_service.drafting import Drafting
from draft_service.link import Identity
from draft_service.planners import Shaped, make_planner
from draft_service.worker import Worker
from engine.batch import Segment
from engine.runner import ModelRunner
from outrider import rpc
from outrider.args import DraftArgs, VerifyArgs
from outrider.cost_table import CostTable
from outrider.errors import Unavailable
from outrider.supervisor import die_with_parent
from outrider.telemetry import announce, configure_logging
from outrider.v1 import verify_pb2_grpc
from verify_service.app import Engine, build_servicer, build_step_loop
from verify_service.commands import Inbox, Stop
from verify_service.sizing import Sizes
from verify_service.step_loop import Responses

ROW_MS = 0.05


class RowRunner(ScriptedRunner):
    """Steps take longer the more rows they have."""

    def __init__(self, setting: Setting, num_slots: int) -> None:
        super().__init__(setting, num_slots)
        self._setting = setting
        self._clocks: dict[int, Clock] = {}

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """See ScriptedRunner."""
        rows = sum(len(segment.tokens) for segment in segments)
        if rows not in self._clocks:
            self._clocks[rows] = Clock(step_ms(self._setting, rows), burn=self._setting.burn)
        self._clock = self._clocks[rows]
        return super().forward(segments)


def step_ms(setting: Setting, rows: int) -> float:
    """Of the target."""
    return setting.verify_ms + ROW_MS * rows


def main(words: list[str]) -> int:
    """Runs one of the two."""
    part, address, text = words
    die_with_parent()
    configure_logging(part)
    torch.set_num_threads(1)
    setting = Setting.from_json(text)
    return uvloop.run(_verify(address, setting) if part == "verify" else _draft(address, setting))


async def _verify(address: str, setting: Setting) -> int:
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    num_slots = 2 * setting.batch * (setting.max_len + setting.num_draft_tokens + 1)
    args = VerifyArgs(
        listen=address, max_running_requests=max(setting.batch, 2), disable_radix_cache=True,
        features=f"aux:{','.join(map(str, AUX_LAYERS))}" if setting.feature_width else "none",
    )  # fmt: skip
    costs = CostTable({rows: step_ms(setting, rows) for rows in (1, 512)})
    runner = cast("ModelRunner", RowRunner(setting, num_slots))
    engine = Engine(runner, Sizes(num_slots, setting.max_len, 2048), costs, "")
    inbox = Inbox()
    step_loop = build_step_loop(args, engine, inbox, lambda batch: loop.call_soon_threadsafe(deliver, batch))
    servicer = build_servicer(args, engine, step_loop, inbox)

    def deliver(batch: Responses) -> None:
        servicer.deliver(batch)

    server = rpc.create_server()
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server)
    rpc.bind(server, address)
    await server.start()
    thread = threading.Thread(target=step_loop.run)
    thread.start()
    announce("ready")
    await stopping.wait()
    inbox.put(Stop(Unavailable("the benchmark is over")))
    await asyncio.to_thread(thread.join)
    await server.stop(grace=1.0)
    return 0


async def _draft(address: str, setting: Setting) -> int:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    with ThreadPoolExecutor(1, thread_name_prefix="drafter") as executor:
        drafter = make_drafter(ScriptedModel(setting), setting)
        cast("Shaped", drafter).reshape(TreeShape(*CHAIN))
        planner = make_planner(DraftArgs(speculative_algorithm="EAGLE3"), drafter)
        drafting = Drafting(drafter, executor=executor, planner=planner)
        identity = Identity(f"scripted:{os.getpid()}", "bench", secrets.token_hex(8))
        worker = Worker([address], drafting, identity, max_sessions=max(setting.batch, 2))
        working = asyncio.create_task(worker.run())
        announce("ready")
        await stopping.wait()
        await worker.drain(5.0)
        working.cancel()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
