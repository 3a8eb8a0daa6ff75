"""A session held inside a step, so that a test decides what reaches the engine before the next one."""

from __future__ import annotations

import asyncio
from typing import Any

from outrider.sampling import SamplingParams
from outrider.v1 import verify_pb2
from tests.drafter_view import Draft, Seen
from tests.fake_drafters import FakeDrafter, silent
from tests.fakes import ToyModel
from tests.verify_service.conftest import Service, tokens_of
from tests.verify_service.rig import request
from verify_service.commands import ProposalsArrived

MODEL = ToyModel(vocab_size=32, order=3)
PROMPT = [4, 2]
OUTPUT = MODEL.greedy(PROMPT, 100)
TEXT = PROMPT + OUTPUT
LONG = SamplingParams(temperature=0.0, max_tokens=60)


class Held:
    """A session held at the gate of a step, and its drafter."""

    def __init__(self, service: Service, drafter: FakeDrafter, task: asyncio.Task[Any]) -> None:
        self.service = service
        self.drafter = drafter
        self.task = task

    @property
    def seen(self) -> Seen:
        (seen,) = self.drafter.view.sessions.values()
        return seen

    async def propose(self, *drafts: Draft) -> None:
        """Sends proposals and waits until the engine's inbox has them."""
        await self.send(*(self.drafter.view.propose(self.seen, draft) for draft in drafts))

    async def send(self, *proposals: verify_pb2.Proposal) -> None:
        before = self.service.inbox.kinds.count(ProposalsArrived)
        self.drafter.send(*proposals)
        await self.service.inbox.until(lambda: self.service.inbox.kinds.count(ProposalsArrived) > before)

    async def finish(self) -> list[int]:
        """Lets everything run; returns the answer."""
        self.service.gate.open()
        tokens = tokens_of(await self.task)
        await self.service.inbox.idle()
        if not self.drafter.has_ended:  # what it was told last may be on its way
            await self.drafter.until(lambda: not self.drafter.view.sessions or self.drafter.has_ended)
        return tokens


async def hold(service: Service, *, after: int = 0, params: SamplingParams = LONG, **drafter: Any) -> Held:
    """A session with a drafter that is silent by itself, held before its step number `after` + 1."""
    fake = await service.draft(silent, **drafter)
    service.gate.close(after)
    task = asyncio.create_task(service.generate(request(PROMPT, params)))
    await service.gate.at_step()
    await fake.until(lambda: fake.view.sessions)
    return Held(service, fake, task)
