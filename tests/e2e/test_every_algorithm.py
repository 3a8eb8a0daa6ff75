"""Every algorithm, drafting from real weights through the real services: the output is that of no speculation."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draft_service.copying import Copier
from draft_service.drafters.base import Drafter
from tests.e2e.pair import Answer, drafter_of, features_of, running
from tests.engine.heads import make
from tests.polling import until_async

CONTEXT = 1024
RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(3, make.VOCAB, size=size).tolist() for size in (3, 40, 1, 17, 64, 9, 120, 33)]
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 8}
CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}


@dataclass(frozen=True)
class Case:
    """An algorithm with its flags; `head` writes a head, `target` adds one to the files of the target."""

    algorithm: str
    flags: dict[str, Any]
    head: Callable[[Path], Path | None] = lambda folder: None
    target: Callable[[make.Written], make.Written] = lambda written: written


CASES = {
    "ngram": Case("NGRAM", {}),
    "standalone-itself": Case("STANDALONE", CHAIN, head=lambda folder: folder / "target"),
    "standalone-tree": Case(
        "STANDALONE",
        TREE,
        head=lambda folder: make.write_target(folder / "draft", 9, max_position_embeddings=CONTEXT).folder,
    ),
    "eagle": Case("EAGLE", CHAIN, head=lambda folder: make.eagle(folder / "head").folder),
    "eagle-tree": Case("EAGLE", TREE, head=lambda folder: make.eagle(folder / "head").folder),
    "eagle3": Case("EAGLE3", CHAIN, head=lambda folder: make.eagle3(folder / "head").folder),
    "eagle3-tree": Case("EAGLE3", TREE, head=lambda folder: make.eagle3(folder / "head").folder),
    "nextn-tree": Case("NEXTN", TREE, target=make.add_nextn),
    "mimo": Case("NEXTN", {}, target=make.add_mimo),
    "multi-layer": Case("EAGLE", {"enable_multi_layer_eagle": True}, target=make.add_multi_layer),
}


@dataclass(frozen=True)
class Setup:
    """A case on disk."""

    target: Path
    drafted: Path  # the same target, with the layers that heads of some kinds have in its files
    algorithm: str
    flags: dict[str, Any] = field(default_factory=dict)

    @property
    def features(self) -> str:
        return features_of(self.drafted, self.algorithm, **self.flags)

    def drafter(self) -> Drafter:
        return drafter_of(self.drafted, self.algorithm, **self.flags)


@pytest.fixture(scope="module", params=list(CASES))
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    case, folder = CASES[request.param], tmp_path_factory.mktemp(request.param)
    target = make.write_target(folder / "target", max_position_embeddings=CONTEXT)
    drafted = case.target(make.write_target(folder / "drafted", max_position_embeddings=CONTEXT))
    head = case.head(folder)
    flags = case.flags if head is None else case.flags | {"speculative_draft_model_path": str(head)}
    return Setup(target.folder, drafted.folder, case.algorithm, flags)


def texts(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


@pytest.mark.asyncio
async def test_alone_together_and_again_from_the_cache(setup: Setup) -> None:
    async with running(setup.target, setup.features, disable_radix_cache=True) as pair:
        plain = texts(await pair.answers(PROMPTS))
        sampled = texts(await pair.answers(PROMPTS, temperature=1.0, seed=5))
    async with running(setup.target, setup.features) as pair, pair.drafting(setup.drafter()):
        alone = [await pair.answer(prompt) for prompt in PROMPTS[:4]]
        assert texts(alone) == plain[:4]
        together = await pair.answers(PROMPTS)
        assert texts(together) == plain
        assert sum(answer.num_drafted for answer in together) > 0
        again = await pair.answers(PROMPTS)
        assert texts(again) == plain
        assert all(answer.cached_tokens for answer, prompt in zip(again, PROMPTS, strict=True) if len(prompt) > 1)
        assert texts(await pair.answers(PROMPTS, temperature=1.0, seed=5)) == sampled


@pytest.mark.asyncio
@pytest.mark.parametrize("early", [False, True])
async def test_steps_that_the_event_loop_runs(setup: Setup, early: bool) -> None:
    """The event loop runs steps that wait for drafts, unless others come meanwhile; the engine's thread the rest."""
    async with running(setup.target, setup.features, lent_ms=math.inf) as pair:
        plain = texts(await pair.answers(PROMPTS))
        sampled = texts(await pair.answers(PROMPTS, temperature=1.0, seed=5))
        ran_by: Counter[int] = Counter()
        pair.meter.before_step = lambda: ran_by.update([threading.get_ident()])
        async with pair.drafting(setup.drafter(), early=early):
            alone = [await pair.answer(prompt) for prompt in PROMPTS[:3]]
            assert texts(alone) == plain[:3]
            assert texts(await pair.answers(PROMPTS)) == plain
            assert texts(await pair.answers(PROMPTS, temperature=1.0, seed=5)) == sampled
    assert len(ran_by) == 2
    assert early or ran_by[threading.get_ident()] > 10


@pytest.mark.asyncio
@pytest.mark.parametrize("page_size", [1, 16])
async def test_preempted_and_prefilled_in_chunks(setup: Setup, page_size: int) -> None:
    """Eight sessions together need more than the pool has; their prompts come in pieces of 16."""
    async with running(setup.target, setup.features) as pair:
        plain = texts(await pair.answers(PROMPTS, 60))
    tight = {"max_total_tokens": 400, "page_size": page_size, "chunked_prefill_size": 16}
    async with running(setup.target, setup.features, **tight) as pair, pair.drafting(setup.drafter()):
        assert texts(await pair.answers(PROMPTS, 60)) == plain
        assert pair.loop.scheduler.num_preemptions > 0


@pytest.mark.asyncio
async def test_drafters_come_late_and_go(setup: Setup) -> None:
    """Ten sessions are mid-answer when the first drafter enlists; it leaves, and another takes its place."""
    prompts = [*PROMPTS, RNG.integers(3, make.VOCAB, size=600).tolist(), [5, 6]]
    async with running(setup.target, setup.features, max_total_tokens=8192) as pair:
        plain = texts(await pair.answers(prompts, 250))
        mid_answer, steps, loop = asyncio.Event(), count(), asyncio.get_running_loop()

        def stop_once() -> None:
            if next(steps) == 14:
                pair.meter.opened.clear()
                loop.call_soon_threadsafe(mid_answer.set)

        pair.meter.before_step = stop_once
        drafters = [setup.drafter() for _ in range(2)]  # answers go on while a model is loaded
        answers = asyncio.create_task(pair.answers(prompts, 250))
        await mid_answer.wait()
        for drafter in drafters:
            async with pair.drafting(drafter) as worker:
                await until_async(
                    lambda: answers.done() or sum(link.stats.proposals for link in worker.links) >= 30,
                    "the drafter drafts no more", pause_s=0,
                )  # fmt: skip
                assert not answers.done()
                pair.meter.opened.clear()  # until the next one dials
        pair.meter.opened.set()
        assert texts(await answers) == plain


@pytest.mark.asyncio
@pytest.mark.parametrize("early", [False, True])
async def test_with_copies_of_the_text(setup: Setup, early: bool) -> None:
    """Answers of a few words repeat themselves: copies go out between the drafter's trees, and it reads them later."""
    copier, words = Copier(), {"logit_bias": dict.fromkeys(range(20, 24), 50.0)}
    async with running(setup.target, setup.features, max_total_tokens=8192) as pair:
        plain = texts(await pair.answers(PROMPTS, 250, **words))
        async with pair.drafting(setup.drafter(), early=early, copier=copier):
            assert texts(await pair.answers(PROMPTS, 250, **words)) == plain
    assert copier.num_accepted > 100


@pytest.mark.asyncio
async def test_up_to_the_context_limit(setup: Setup) -> None:
    prompt = PROMPTS[6]
    async with running(setup.target, setup.features, context_length=160) as pair:
        plain = await pair.answer(prompt, 1000)
        assert len(plain.tokens) == 160 - len(prompt)
        async with pair.drafting(setup.drafter()):
            assert (await pair.answer(prompt, 1000)).tokens == plain.tokens
