"""The verify process of `bench wire`: the service as it is, over a runner that plays a script in fixed time.

    python -m bench._wire_verify ADDRESS REPORT SETTING

Ends on SIGTERM and then writes REPORT: when each frame was handed to gRPC, and when each came from it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import uvloop
from numpy.typing import NDArray

from bench._parts import serve_model
from bench._wire_clock import Clock
from bench._wire_script import AUX_LAYERS, VOCAB_SIZE, Script, Setting
from bench._wire_stamps import frame_key, round_key
from engine.batch import Segment
from engine.config import ModelConfig
from engine.runner import ModelRunner
from outrider.args import VerifyArgs
from outrider.cost_table import CostTable
from outrider.supervisor import die_with_parent
from outrider.telemetry import configure_logging
from outrider.v1 import verify_pb2, verify_pb2_grpc
from verify_service.app import LENT_MS
from verify_service.loading import LoadedModel
from verify_service.service import VerifyServicer
from verify_service.sizing import Sizes
from verify_service.step_loop import StepLoop

NUM_LAYERS = 32


def target_config(setting: Setting) -> ModelConfig:
    """A target of Llama-8B's width, or of the features' where there are any."""
    return ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=VOCAB_SIZE, hidden_size=setting.hidden_size,
        intermediate_size=setting.hidden_size,
        num_layers=NUM_LAYERS, num_heads=32, num_kv_heads=8, head_dim=128, max_position=setting.max_len,
        rope_theta=5e5, rms_eps=1e-5, tied_embeddings=False,
    )  # fmt: skip


class ScriptedRunner:
    """Stands in for engine.runner.ModelRunner: the script's logits, and feature rows, each step in fixed time."""

    dtype = torch.bfloat16
    model_path = Path("/nowhere/scripted")
    numerics_id = "scripted"
    device = torch.device("cpu")

    def __init__(self, setting: Setting, num_slots: int) -> None:
        self.config = target_config(setting)
        self.slot_table = np.zeros((max(setting.batch, 2), setting.max_len), np.int32)
        self.steps_ns: list[tuple[int, int]] = []  # begin and end
        self._script = Script(setting)
        self._clock = Clock(setting.verify_ms, burn=setting.burn)
        self._keys: dict[int, int] = {}  # by table row
        self._logits = np.zeros((setting.batch * (setting.num_draft_tokens + 1), VOCAB_SIZE), np.float32)
        self._written: NDArray[np.intp] = np.empty(0, np.intp)
        self._likeliest: list[int] = []
        width = setting.feature_width
        # Each slot holds the same row: pages that a network would have written long ago are not touched first here.
        self._plane = torch.ones(1, width, dtype=torch.bfloat16).expand(num_slots, width) if width else None

    @property
    def pool(self) -> ScriptedRunner:
        """The object that has `move`: this one."""
        return self

    @property
    def likeliest(self) -> list[int] | None:
        """Each row's likeliest token, which the C decoder's forward pass finds too."""
        return self._likeliest

    def move(self, source: NDArray[np.int32], target: NDArray[np.int32]) -> None:
        """Copies nothing: all slots hold the same."""

    @property
    def features(self) -> torch.Tensor | None:
        """The feature plane [num_slots, width]."""
        return self._plane

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Logits float32 [sum of num_logits, vocab], good until the next call."""
        start_ns = time.monotonic_ns()
        self._logits.reshape(-1)[self._written] = 0.0
        expected = np.concatenate([self._expected(segment) for segment in segments])
        self._written = np.arange(len(expected)) * VOCAB_SIZE + expected
        self._logits.reshape(-1)[self._written] = 1.0
        self._likeliest = expected.tolist()
        self._clock.spend(start_ns)
        self.steps_ns.append((start_ns, time.monotonic_ns()))
        return torch.from_numpy(self._logits[: len(expected)])

    def _expected(self, segment: Segment) -> NDArray[np.int32]:
        """The text's tokens after the rows whose logits are wanted."""
        if segment.prefix_len == 0:
            self._keys[segment.table_row] = int(segment.tokens[0])
        count = len(segment.tokens)
        depths = np.arange(count) if segment.depths is None else segment.depths
        following = segment.prefix_len + depths[count - segment.num_logits :] + 1
        return self._script.text(self._keys[segment.table_row]).tokens[following]


class Stamped(verify_pb2_grpc.VerifyServiceServicer):
    """Notes when frames of Speculate go to gRPC (`sent_ns`, by session and base_len of the first verdict) and come."""

    def __init__(self, servicer: VerifyServicer, sent_ns: dict[str, int], came_ns: dict[str, int]) -> None:
        self._servicer = servicer
        self._sent_ns = sent_ns
        self._came_ns = came_ns

    async def Generate(
        self, request: verify_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[verify_pb2.GenerateResponse]:
        """Calls the service's own."""
        async for response in self._servicer.Generate(request, context):
            yield response

    async def GenerateMany(
        self, request_iterator: AsyncIterator[verify_pb2.GenerateManyRequest], context: Any
    ) -> AsyncIterator[verify_pb2.GenerateManyResponse]:
        """See Generate."""
        async for response in self._servicer.GenerateMany(request_iterator, context):
            yield response

    async def StreamFeatures(
        self, request: verify_pb2.StreamFeaturesRequest, context: Any
    ) -> AsyncIterator[verify_pb2.StreamFeaturesResponse]:
        """See Generate."""
        async for response in self._servicer.StreamFeatures(request, context):
            yield response

    async def GetServerInfo(self, request: verify_pb2.VerifyServiceGetServerInfoRequest, context: Any) -> Any:
        """See Generate."""
        return await self._servicer.GetServerInfo(request, context)

    async def FlushCache(self, request: verify_pb2.FlushCacheRequest, context: Any) -> Any:
        """See Generate."""
        return await self._servicer.FlushCache(request, context)

    async def Speculate(  # pyright: ignore[reportIncompatibleMethodOverride] - see the service's
        self, request_iterator: AsyncIterator[verify_pb2.SpeculateRequest], context: Any
    ) -> None:
        """See Generate."""

        async def coming() -> AsyncIterator[verify_pb2.SpeculateRequest]:
            async for frame in request_iterator:
                if frame.WhichOneof("message") == "proposals" and frame.proposals.proposals:
                    self._came_ns[frame_key(frame.proposals.proposals[0])] = time.monotonic_ns()
                yield frame

        await self._servicer.Speculate(coming(), cast("Any", _Stamping(context, self._sent_ns)))


class _Stamping:
    """A call's context that notes when frames of verdicts are written."""

    def __init__(self, context: Any, sent_ns: dict[str, int]) -> None:
        self._context = context
        self._sent_ns = sent_ns
        self.peer = context.peer

    async def write(self, frame: verify_pb2.SpeculateResponse) -> None:
        """Writes a frame to the context; notes when."""
        if frame.WhichOneof("message") == "round" and frame.round.verdicts:
            self._sent_ns[round_key(frame.round)] = time.monotonic_ns()
        await self._context.write(frame)


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Writes what was measured, for the process that started this one."""
    path.write_text(json.dumps(report), encoding="utf-8")


def main(words: list[str]) -> int:
    """Runs the process."""
    address, report, setting = words
    die_with_parent()
    configure_logging("verify")
    torch.set_num_threads(1)  # as beside the C kernels, which the script stands for
    return uvloop.run(_serve(address, Path(report), Setting.from_json(setting)))


async def _serve(address: str, report: Path, setting: Setting) -> int:
    # Room for every session whole, and for a tree more.
    num_slots = setting.batch * (setting.max_len + setting.num_draft_tokens + 1)
    args = VerifyArgs(
        listen=address, max_running_requests=max(setting.batch, 2), max_verify_nodes=max(setting.num_draft_tokens, 32),
        features=f"aux:{','.join(map(str, AUX_LAYERS))}" if setting.feature_width else "none",
        busy_poll="on" if setting.busy_poll else "off",
    )  # fmt: skip
    runner = ScriptedRunner(setting, num_slots)
    costs = CostTable({1: setting.verify_ms, 512: setting.verify_ms})
    placement = setting.placement(0)
    loaded = LoadedModel(cast("ModelRunner", runner), Sizes(num_slots, setting.max_len, 2048), costs, "", placement)
    sent_ns: dict[str, int] = {}
    came_ns: dict[str, int] = {}
    step_loop = await serve_model(
        args, loaded, lent_ms=LENT_MS, wrap=lambda servicer: Stamped(servicer, sent_ns, came_ns)
    )
    stamps = {"sent_ns": sent_ns, "came_ns": came_ns}
    write_report(report, stamps | _report(runner, step_loop))
    return 0


def _report(runner: ScriptedRunner, step_loop: StepLoop) -> dict[str, Any]:
    stats = step_loop.stats
    return {
        "steps_ns": runner.steps_ns,
        "steps_ms": [(end - begin) / 1e6 for begin, end in runner.steps_ns],
        "verify_steps": stats.verify_steps,
        "committed_tokens": stats.committed_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "draft_tokens": stats.draft_tokens,
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
