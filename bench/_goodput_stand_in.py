"""The services of `bench goodput --stand-in`: as they are, over the scripted networks of `bench wire`.

    python -m bench._goodput_stand_in verify ADDRESS SETTING
    python -m bench._goodput_stand_in draft ADDRESS SETTING

A step of the target takes verify_ms and ROW_MS for each of its rows; the drafter's are chains. Ends on SIGTERM.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import torch
import uvloop

from bench._parts import serve_model, work
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
from outrider.args import DraftArgs, VerifyArgs
from outrider.cost_table import CostTable
from outrider.supervisor import die_with_parent
from outrider.telemetry import configure_logging
from verify_service.loading import LoadedModel
from verify_service.sizing import Sizes

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
    """Milliseconds of a step of the target with so many rows."""
    return setting.verify_ms + ROW_MS * rows


def main(words: list[str]) -> int:
    """Runs one of the two services."""
    part, address, text = words
    die_with_parent()
    configure_logging(part)
    torch.set_num_threads(1)
    setting = Setting.from_json(text)
    return uvloop.run(_verify(address, setting) if part == "verify" else _draft(address, setting))


async def _verify(address: str, setting: Setting) -> int:
    num_slots = 2 * setting.batch * (setting.max_len + setting.num_draft_tokens + 1)
    args = VerifyArgs(
        listen=address, max_running_requests=max(setting.batch, 2), disable_radix_cache=True,
        features=f"aux:{','.join(map(str, AUX_LAYERS))}" if setting.feature_width else "none",
    )  # fmt: skip
    costs = CostTable({rows: step_ms(setting, rows) for rows in (1, 512)})
    runner = cast("ModelRunner", RowRunner(setting, num_slots))
    await serve_model(args, LoadedModel(runner, Sizes(num_slots, setting.max_len, 2048), costs, ""))
    return 0


async def _draft(address: str, setting: Setting) -> int:
    with ThreadPoolExecutor(1, thread_name_prefix="drafter") as executor:
        drafter = make_drafter(ScriptedModel(setting), setting)
        cast("Shaped", drafter).reshape(TreeShape(*CHAIN))
        planner = make_planner(DraftArgs(speculative_algorithm="EAGLE3"), drafter)
        drafting = Drafting(drafter, planner, executor=executor)
        identity = Identity(f"scripted:{os.getpid()}", "bench", secrets.token_hex(8))
        worker = Worker([address], drafting, identity, max_sessions=max(setting.batch, 2))
        await work(worker)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
