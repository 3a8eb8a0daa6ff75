"""Through Generate, first tokens follow the target's distribution, and a seed's answer does not depend on drafts."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import numpy as np
import pytest
from scipy.stats import chisquare

from kernels.sampling import Filters, filtered_row
from outrider.sampling import SamplingParams
from outrider.v1 import common_pb2, verify_pb2
from tests.drafter_view import Draft, Policy, Seen
from tests.fake_drafters import Truth, early, perfect, random_draft, random_trees, wrong
from tests.fakes import ToyModel
from tests.verify_service.conftest import Serve, Service, tokens_of
from tests.verify_service.rig import request

VOCAB = 6
MODEL = ToyModel(vocab_size=VOCAB, order=2, spread=1.0)
PROMPT = [3, 1]
NUM_CHOICES, NUM_SEEDS = 48, 20
PER_ANSWER = 3  # tokens
LEAST_P = 1e-4  # of a chance result so far off; seeds are fixed, so it either holds or does not


def whole_tree(seen: Seen) -> list[Draft]:
    """Every token, and every token after it: whatever comes is in the tree."""
    tokens = list(range(VOCAB)) + [token for _ in range(VOCAB) for token in range(VOCAB)]
    parents = [-1] * VOCAB + [parent for parent in range(VOCAB) for _ in range(VOCAB)]
    return [Draft(tokens, parents)]


async def draw(service: Service, params: SamplingParams, seed: int, enabled: bool) -> list[tuple[int, ...]]:
    """The answers of all choices for one seed."""
    params = SamplingParams(params.temperature, params.top_k, params.top_p, params.min_p, seed, PER_ANSWER)
    speculative = common_pb2.SpeculativeParams(enabled=enabled)
    responses = await service.generate(request(PROMPT, params, choices=NUM_CHOICES, speculative=speculative))
    return [tuple(tokens_of(responses, choice)) for choice in range(NUM_CHOICES)]


def expected_share(params: SamplingParams, answer: tuple[int, ...]) -> float:
    """The target's probability of an answer."""
    share, path = 1.0, list(PROMPT)
    filters = Filters(params.temperature, params.top_k, params.top_p, params.min_p)
    for token in answer:
        row = filtered_row(MODEL.logits(path), filters)
        assert row is not None
        share *= float(row[token])
        path.append(token)
    return share


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=4),
        SamplingParams(temperature=1.3, top_p=0.8, min_p=0.05),
    ],
)
async def test_answers_follow_the_targets_distribution_with_drafts_and_without(
    serve: Serve, params: SamplingParams
) -> None:
    service = await serve(MODEL, max_running_requests=64, max_queued_requests=10_000, max_verify_nodes=64)
    await service.patient_draft(whole_tree)
    for enabled in (True, False):
        answers = await asyncio.gather(*(draw(service, params, seed, enabled) for seed in range(NUM_SEEDS)))
        counts = Counter(answer for batch in answers for answer in batch)
        total = NUM_CHOICES * NUM_SEEDS
        assert all(expected_share(params, answer) > 0 for answer in counts)
        every = list(np.ndindex(*[VOCAB] * PER_ANSWER))
        shares = np.array([expected_share(params, answer) for answer in every])
        assert shares.sum() == pytest.approx(1.0)
        observed = np.array([counts[answer] for answer in every], np.float64)
        # Rare answers together, as the test needs at least five expected in each class.
        rare = shares * total < 5
        observed = np.append(observed[~rare], observed[rare].sum())
        wanted = np.append(shares[~rare], shares[rare].sum()) * total
        keep = wanted > 0
        assert chisquare(observed[keep], wanted[keep]).pvalue > LEAST_P
    info = await service.stub.GetServerInfo(verify_pb2.VerifyServiceGetServerInfoRequest())
    assert info.speculation.accepted_tokens == NUM_CHOICES * NUM_SEEDS  # one of three tokens each time


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["perfect", "wrong", "random", "early", "thick"])
async def test_a_seeds_answers_are_the_same_with_drafts_and_without(serve: Serve, name: str) -> None:
    rng, truth = random.Random(1), Truth()
    policies: dict[str, Policy] = {
        "perfect": perfect(truth),
        "wrong": wrong(truth, VOCAB),
        "random": random_trees(truth, VOCAB, rng),
        "early": early(truth, VOCAB, rng),
        "thick": lambda seen: [random_draft(truth.after(seen.tokens, 30), VOCAB, rng, 30) for _ in range(3)],
    }
    service = await serve(MODEL)
    params = [
        SamplingParams(temperature=1.0, seed=1, max_tokens=40),
        SamplingParams(temperature=0.8, top_p=0.9, seed=2, max_tokens=40, presence_penalty=0.7),
        SamplingParams(temperature=1.2, top_k=3, seed=3, max_tokens=40, repetition_penalty=1.2),
        SamplingParams(temperature=0.0, max_tokens=40, frequency_penalty=0.4),
    ]

    async def answers() -> list[list[int]]:
        return [
            tokens_of(each) for each in await asyncio.gather(*(service.generate(request(PROMPT, p)) for p in params))
        ]

    plain = await answers()
    truth.texts += [PROMPT + answer for answer in plain]
    drafter = await service.draft(policies[name])
    assert await answers() == plain
    await drafter.until(lambda: len(drafter.view.closed) == len(params))
