"""Each session of a step gets what its own rows say, and what its request wants to see of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from kernels.acceptance import Accepted
from outrider.sampling import SamplingParams
from outrider.v1 import common_pb2
from tests.drafter_view import Draft
from tests.fakes import toy_config
from tests.verify_service.rig import build_factory, request
from verify_service.proposals import Match, Proposal
from verify_service.sampler import Sampler
from verify_service.session import Session
from verify_service.work import Work

VOCAB, CONTEXT = 12, 64


def make_work(
    params: SamplingParams, rows: int, *, samples: bool = True, draft: Draft | None = None, **speculative: Any
) -> Work:
    ask = request([1] * rows, params)
    ask.speculative.CopyFrom(common_pb2.SpeculativeParams(**speculative))
    (session,) = build_factory(toy_config(VOCAB, CONTEXT)).build(ask)
    work = Work(session, range(rows), samples)
    if draft is not None:
        prepare(session)
        proposal = Proposal(1, session.committed_len, np.empty(0, np.int32), draft.tree)
        nodes = np.arange(len(draft.tree), dtype=np.int32)
        work.verify(Match(proposal, -1, draft.tree, nodes, np.zeros(len(nodes), np.uint8)), range(1, 1 + len(nodes)))
    return work


def prepare(session: Session) -> None:
    session.kv_len = session.committed_len
    session.commit([2])


@pytest.mark.parametrize("threshold", [1.0, 0.01])
def test_a_row_without_a_distribution_takes_nothing_from_the_tokens_before_it(threshold: float) -> None:
    """What was accepted may end the output, and then nobody asks that row."""
    params = SamplingParams(temperature=0.0 if threshold == 1.0 else 1.0, seed=1)
    rows = np.zeros((3, VOCAB), np.float32)
    rows[0, 4] = rows[1, 5] = 50.0
    rows[2] = math.nan
    work = make_work(params, 1, draft=Draft([4, 5], [-1, 0]), accept_threshold_single=threshold)
    work.session.logprobs = True
    (outcome,) = Sampler().accept([work], torch.from_numpy(rows))
    assert outcome == ([0], 5)
    assert [found.token for found in work.logprobs] == [4, 5]
    rows[1] = math.nan
    work = make_work(params, 1, draft=Draft([4, 5], [-1, 0]), accept_threshold_single=threshold)
    assert Sampler().accept([work], torch.from_numpy(rows)) == [([], 4)]
    rows[0] = math.nan
    work = make_work(params, 1, draft=Draft([4, 5], [-1, 0]), accept_threshold_single=threshold)
    assert Sampler().accept([work], torch.from_numpy(rows)) == [None]


def test_beside_sessions_that_want_the_highest_logits_alone_others_get_what_they_ask() -> None:
    greedy, sampled = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_k=3, seed=5)
    rows = np.random.default_rng(0).normal(size=(5, VOCAB)).astype(np.float32)
    highest = rows.argmax(axis=1).tolist()
    outcomes: list[list[Accepted | None]] = []
    for likeliest in (None, highest):
        tree = Draft([highest[1], (highest[1] + 1) % VOCAB], [-1, -1])
        works = [make_work(greedy, 1), make_work(greedy, 1, draft=tree), make_work(sampled, 1)]
        works[1].session.include_trees = works[1].session.logprobs = True
        outcomes.append(Sampler().accept(works, torch.from_numpy(rows), likeliest))
        chances = np.exp(rows[1].astype(np.float64)) / np.exp(rows[1].astype(np.float64)).sum()
        assert works[1].probabilities == pytest.approx([chances[token] for token in tree.tree.tokens])
        assert [found.token for found in works[1].logprobs] == [highest[1], highest[2]]
    assert outcomes[0] == outcomes[1]


def test_a_step_gives_each_session_its_own_rows() -> None:
    greedy = SamplingParams(temperature=0.0)
    tree = Draft([6, 7], [-1, -1])
    works = [
        make_work(greedy, 3, samples=False),
        make_work(greedy, 2),
        make_work(greedy, 1, draft=tree),
        make_work(greedy, 2),
    ]
    rows = np.zeros((5, VOCAB), np.float32)
    rows[0, 9] = 1.0
    rows[1, 7] = rows[3, 8] = 1.0  # the tree's root wants node 1, whose own row wants 8
    rows[4] = math.nan
    for likeliest in (None, [9, 7, 0, 8, -1]):
        outcomes = Sampler().accept(works, torch.from_numpy(rows), likeliest)
        assert outcomes[0] is None
        assert outcomes[1] is not None
        assert (outcomes[1].nodes, outcomes[1].bonus) == ([], 9)
        assert outcomes[2] is not None
        assert (outcomes[2].nodes, outcomes[2].bonus) == ([1], 8)
        assert outcomes[3] is None
