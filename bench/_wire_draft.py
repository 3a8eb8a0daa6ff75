"""The draft process of `bench wire`: links, sessions, trees and features as they are, over a model that plays a script.

    python -m bench._wire_draft VERIFY_ADDRESS REPORT SETTING

Ends on SIGTERM and then writes REPORT: when each frame came and went, and what `next` had foretold.
"""

from __future__ import annotations

import secrets
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
import uvloop

from bench._parts import work
from bench._wire_model import ScriptedModel
from bench._wire_script import AUX_LAYERS, VOCAB_SIZE, Setting
from bench._wire_stamps import Stamps, frame_key, round_key
from bench._wire_verify import target_config, write_report
from draft_service.drafters.base import Drafter
from draft_service.drafters.eagle import EagleDrafter
from draft_service.drafters.models import HeadModel
from draft_service.drafters.shape import TreeShape
from draft_service.drafters.standalone import StandaloneDrafter
from draft_service.drafting import Drafting, Send
from draft_service.fetching import Lost
from draft_service.link import Identity
from draft_service.overlap import FixedOverlap
from draft_service.planning import FixedPlanner
from draft_service.sessions import SessionTable
from draft_service.worker import Worker
from outrider.placement import Placement
from outrider.row_ring import host_id
from outrider.supervisor import die_with_parent
from outrider.telemetry import configure_logging
from outrider.v1 import common_pb2, verify_pb2

_LARGE = 2**20  # bytes of a round whose rows are not kept


class Stamping(Drafting):
    """Notes which rounds led to which frames, their sizes, and what verdicts verified, beside what `next` foretold."""

    def __init__(
        self, drafter: Drafter, *, early: bool, executor: ThreadPoolExecutor, placement: Placement
    ) -> None:  # fmt: skip
        super().__init__(drafter, FixedPlanner(FixedOverlap(on=early)), executor=executor, placement=placement)
        self.trips: list[tuple[str, str]] = []  # a round's key, and that of the fresh proposal after it
        self.rounds: list[verify_pb2.Round] = []  # with verdicts, without their rows
        self.round_bytes: list[int] = []
        self.sent: list[verify_pb2.SpeculateRequest] = []  # with proposals

    async def serve(
        self, table: SessionTable, rounds: Sequence[verify_pb2.Round], send: Send, lost: Sequence[Lost] = ()
    ) -> None:
        """Serves as Drafting does."""
        verdicts = [round for round in rounds if round.verdicts]
        answered = not verdicts

        async def noting(frame: verify_pb2.SpeculateRequest) -> None:
            nonlocal answered
            first = next(iter(frame.proposals.proposals), None)
            if first is not None and not first.assumed and not answered:
                answered = True
                self.trips.append((round_key(verdicts[-1]), frame_key(first)))
            if first is not None:
                self.sent.append(frame)
            await send(frame)

        await super().serve(table, rounds, noting, lost)
        for round in verdicts:
            self.rounds.append(round)
            self.round_bytes.append(size := round.ByteSize())
            for verdict in round.verdicts if size > _LARGE else ():
                verdict.ClearField("features")  # they were copied

    def foretold(self) -> Counter[str]:
        """Counts what verdicts verified, beside what `next` had foretold; when all is over, so that no round pays."""
        early = {
            (proposal.session, proposal.proposal_id): len(proposal.assumed) > 0
            for frame in self.sent
            for proposal in frame.proposals.proposals
        }
        found: Counter[str] = Counter()
        following: dict[int, verify_pb2.Next] = {}
        for verdict in (verdict for round in self.rounds for verdict in round.verdicts):
            told = following.pop(verdict.session, None)
            used = [credit.proposal_id for credit in verdict.credits]
            found["rounds"] += 1
            found["early"] += bool(used) and early.get((verdict.session, used[-1]), False)
            if told is not None:
                found["told"] += 1
                wrong = {
                    verify_pb2.NEXT_KIND_PROPOSAL: used != [told.proposal_id],
                    verify_pb2.NEXT_KIND_WAITING: not used,
                    verify_pb2.NEXT_KIND_PLAIN: bool(used),
                }
                found["wrong"] += wrong.get(told.kind, True)
            if verdict.next.kind != verify_pb2.NEXT_KIND_NONE:
                following[verdict.session] = verdict.next
                found[verify_pb2.NextKind.Name(verdict.next.kind).removeprefix("NEXT_KIND_").lower()] += 1
        return found


def make_drafter(model: ScriptedModel, setting: Setting) -> Drafter:
    """EAGLE-3's drafter where there are features, else a draft model's."""
    shape = TreeShape(setting.num_steps, setting.topk, setting.num_draft_tokens)
    config = target_config(setting)
    target = common_pb2.ModelInfo(vocab_size=VOCAB_SIZE, hidden_size=config.hidden_size, num_layers=config.num_layers)
    if not setting.feature_width:
        return StandaloneDrafter(model, shape, draft_model="scripted", target=target)
    features = common_pb2.FeatureLayout(
        kind=common_pb2.FEATURE_KIND_AUX, aux_layers=AUX_LAYERS, width=setting.feature_width
    )
    return EagleDrafter(
        cast("HeadModel", model), shape, algorithm=common_pb2.ALGORITHM_EAGLE3, draft_model="scripted",
        features=features, target=target,
    )  # fmt: skip


def main(words: list[str]) -> int:
    """Runs the process."""
    address, report, setting = words
    die_with_parent()
    configure_logging("draft")
    torch.set_num_threads(1)  # as beside the C kernels, which the scripted networks stand for
    return uvloop.run(_draft(address, Path(report), Setting.from_json(setting)))


async def _draft(address: str, report: Path, setting: Setting) -> int:
    with ThreadPoolExecutor(1, thread_name_prefix="drafter") as executor:
        model = ScriptedModel(setting)
        drafter = make_drafter(model, setting)
        drafter.warm_up()
        warm_steps = len(model.steps_ns)
        drafting = Stamping(drafter, early=setting.early, executor=executor, placement=setting.placement(1))
        identity = Identity("scripted", host_id(), secrets.token_hex(8))
        stamps = Stamps()
        worker = Worker(
            [address], drafting, identity, max_sessions=max(setting.batch, 2), dial=stamps.dial,
            busy_poll=setting.busy_poll,
        )  # fmt: skip
        await work(worker)
    write_report(report, _report(drafting, stamps, model.steps_ns[warm_steps:]))
    return 0


def _report(drafting: Stamping, stamps: Stamps, steps_ns: list[tuple[int, int]]) -> dict[str, Any]:
    came_ns, sent_ns = stamps.came_ns, stamps.sent_ns
    firsts = [frame.proposals.proposals[0] for frame in drafting.sent]
    early = {frame_key(first): len(first.assumed) > 0 for first in firsts}
    return {
        "trips": [
            (round, came_ns[round], frame, sent_ns[frame]) for round, frame in drafting.trips if frame in sent_ns
        ],
        "rounds_came": came_ns,
        "frames_sent": {frame: (at, early[frame]) for frame, at in sent_ns.items()},
        "round_bytes": drafting.round_bytes,
        "proposal_bytes": [frame.ByteSize() for frame in drafting.sent],
        "foretold": drafting.foretold(),
        "steps_ns": steps_ns,
        "steps_ms": [(end - begin) / 1e6 for begin, end in steps_ns],
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
