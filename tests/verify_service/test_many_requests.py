"""Thousands of requests, cancelled at random: every answer right, every page free at the end."""

from __future__ import annotations

import random

import pytest

from outrider.errors import ResourceExhausted
from outrider.sampling import SamplingParams
from tests.fake_drafters import Truth, random_trees
from tests.verify_service.rig import Rig, build_rig, expected, prompt_of, request
from verify_service.session import Session

NUM_REQUESTS = 2_000  # in each of the two
NUM_PREFIXES = 20
CHECKED_EVERY = 500  # steps between looks at all pages


def submit_one(rig: Rig, rng: random.Random) -> list[Session]:
    """A short request, often with a beginning that others have."""
    vocab_size = rig.runner.model.vocab_size
    shared = prompt_of(24, vocab_size, rng.randrange(NUM_PREFIXES))[: rng.randint(1, 24)]
    prompt = shared + prompt_of(rng.randint(0, 8), vocab_size, rng.randrange(2**31))
    params = SamplingParams(
        temperature=rng.choice([0.0, 1.0]), max_tokens=rng.randint(1, 9), seed=rng.randrange(1000), ignore_eos=True
    )
    return rig.submit(request(prompt, params, choices=rng.choice([1, 1, 1, 2])))


@pytest.mark.parametrize(("page_size", "longest_prefix_first"), [(1, False), (16, True)])
def test_thousands_of_requests_leave_every_page_free(page_size: int, longest_prefix_first: bool) -> None:
    rng = random.Random(page_size)
    rig = build_rig(
        pages=192 // page_size, page_size=page_size, context=48, longest_prefix_first=longest_prefix_first, brake=True,
        max_queued=256,
    )  # fmt: skip
    rig.join(random_trees(Truth(), rig.runner.model.vocab_size, rng, nodes=6))
    alive: dict[int, Session] = {}
    cancelled: set[int] = set()
    submitted = checked = steps = 0
    while submitted < NUM_REQUESTS or not rig.is_idle:
        if submitted < NUM_REQUESTS and len(rig.loop.scheduler.waiting) < 24:
            for session in submit_one(rig, rng):
                alive[session.session_id] = session
            submitted += 1
        if alive and rng.random() < 0.3:
            victim = alive.pop(rng.choice(list(alive)))
            cancelled.add(victim.session_id)
            rig.cancel(victim)
        rig.take_step()
        steps += 1
        if steps % CHECKED_EVERY == 0:
            rig.check()
        for number in [number for number in alive if number in rig.finishes or number in rig.errors]:
            session = alive.pop(number)
            if number in rig.errors:
                assert isinstance(rig.errors[number], ResourceExhausted)
            elif submitted % 7 == 0:
                assert rig.output(session) == expected(rig, session)
                checked += 1
    assert checked > NUM_REQUESTS // 20
    assert len(cancelled) > NUM_REQUESTS // 10
    rig.act()
    rig.check_whole()
