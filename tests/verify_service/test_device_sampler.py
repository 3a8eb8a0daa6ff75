"""A step drawn on a device gives what the host's sampler gives, for sessions of all kinds at once."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.sampling import SamplingParams
from outrider.tree import TokenTree
from outrider.v1 import common_pb2
from tests.fake_drafters import random_draft
from tests.fakes import toy_config
from tests.kernels.interpreted import kernel_device, run_under_the_interpreter
from tests.verify_service.rig import build_factory, request
from verify_service.device_sampler import TORCH, DeviceSampler, Kernels
from verify_service.proposals import Match, Proposal
from verify_service.sampler import Sampler
from verify_service.work import Work

VOCAB, CONTEXT = 40, 64
CPU = torch.device("cpu")


class EveryThird:
    """A grammar: after a path of n tokens only ids that n leaves no remainder of, modulo 3, may follow."""

    def forbid(self, row: NDArray[np.float32], path: list[int]) -> None:
        row[self._refused(path)] = -math.inf

    def mask_words(self, path: list[int]) -> NDArray[np.int32]:
        bits = np.zeros(64, np.bool_)
        bits[:VOCAB] = ~self._refused(path)
        return np.packbits(bits, bitorder="little").view(np.int32)

    @staticmethod
    def _refused(path: list[int]) -> NDArray[np.bool_]:
        return np.arange(VOCAB) % 3 != len(path) % 3


def make_work(seed: int) -> Work:
    """A session of some kind in some step: a chunk, a prompt's end, one token, or a tree."""
    rng = random.Random(seed)
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.5, 1.2]),
        top_k=rng.choice([0, 0, 4]),
        top_p=rng.choice([1.0, 0.6]),
        min_p=rng.choice([0.0, 0.0, 0.1]),
        presence_penalty=rng.choice([0.0, 0.0, 0.8]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        logit_bias=rng.choice([{}, {3: 2.5}]),
        min_tokens=rng.choice([0, 9]),
        stop_token_ids=(1, 2),
        seed=rng.getrandbits(64),
    )
    ask = request([rng.randrange(VOCAB) for _ in range(6)], params, include_trees=rng.random() < 0.3)
    ask.logprobs = rng.random() < 0.4
    ask.prompt_logprobs = rng.random() < 0.3
    if ask.logprobs or ask.prompt_logprobs:
        ask.top_logprobs = rng.choice([0, 3])
    if rng.random() < 0.3:
        ask.speculative.CopyFrom(common_pb2.SpeculativeParams(accept_threshold_single=0.2, accept_threshold_acc=0.7))
    (session,) = build_factory(toy_config(VOCAB, CONTEXT)).build(ask)
    if rng.random() < 0.3:
        session.sampler._grammar = EveryThird()  # type: ignore[assignment]
        session.sampler._is_shaped, session.sampler.takes_highest = True, False
    if rng.random() < 0.3:
        return Work(session, range(rng.randrange(1, 7)), rng.random() < 0.5)
    session.kv_len = session.committed_len
    session.sampler.commit(session.commit([5, 3]))
    session.kv_len += 1
    work = Work(session, [0], True)
    if rng.random() < 0.8:
        tree = random_draft([rng.randrange(VOCAB) for _ in range(4)], VOCAB, rng, 9).tree
        nodes = np.arange(len(tree), dtype=np.int32)
        proposal = Proposal(1, session.committed_len, np.empty(0, np.int32), tree)
        work.verify(Match(proposal, -1, tree, nodes, np.zeros(len(tree), np.uint8)), range(1, 1 + len(tree)))
    return work


def logits_for(works: list[Work], rng: np.random.Generator) -> torch.Tensor:
    """Random rows that like the drafts, so that walks are long; now and then one without a distribution."""
    rows = []
    for work in works:
        own = rng.normal(size=(work.num_logits, VOCAB)).astype(np.float32) * 2
        tree = work.match.tree if work.match is not None else TokenTree.empty()
        for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
            own[parent + 1, token] += 3.0 if node % 3 else 1.0
        if len(own) and rng.random() < 0.1:
            own[rng.integers(len(own))] = math.nan
        rows.append(own)
    return torch.from_numpy(np.concatenate(rows))


def assert_same_scores(mine: Any, theirs: Any) -> None:
    found, wanted = ([[each, *each.top] for each in scores] for scores in (mine, theirs))
    assert [[each.token for each in group] for group in found] == [[each.token for each in group] for group in wanted]
    for group, other in zip(found, wanted, strict=True):
        assert [each.logprob for each in group] == pytest.approx([each.logprob for each in other], nan_ok=True)


def check(kernels: Kernels, device: torch.device, seeds: list[int], seed: int) -> None:
    mine, theirs = ([make_work(each) for each in seeds] for _ in range(2))
    logits = logits_for(mine, np.random.default_rng(seed))
    found = DeviceSampler(device, kernels).accept(mine, logits.clone().to(device))
    wanted = Sampler().accept(theirs, logits)
    assert found == wanted
    for one, other in zip(mine, theirs, strict=True):
        assert one.probabilities == pytest.approx(other.probabilities, nan_ok=True)
        assert_same_scores(one.logprobs, other.logprobs)
        assert (one.session.prompt_logprobs is None) == (other.session.prompt_logprobs is None)
        assert_same_scores(one.session.prompt_logprobs or [], other.session.prompt_logprobs or [])


SEEDS = st.lists(st.integers(0, 2**32), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(SEEDS, st.integers(0, 2**32))
def test_a_step_is_drawn_as_on_the_host(seeds: list[int], seed: int) -> None:
    check(TORCH, CPU, seeds, seed)


@pytest.mark.parametrize("rows", [1, 40])
def test_distributions_are_made_a_few_sessions_at_a_time(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verify_service.device_sampler._BIASED_ROWS", rows)
    for seed in range(20):
        check(TORCH, CPU, list(range(6 * seed, 6 * seed + 6)), seed)


def test_warming_up_runs_every_width_that_trees_may_have() -> None:
    widths: list[int] = []

    def walk(parents: torch.Tensor, *rest: torch.Tensor) -> Any:
        widths.append(parents.shape[1])
        return TORCH.accept_coupled(parents, *rest)

    DeviceSampler(CPU, TORCH._replace(accept_coupled=walk)).warm_up(VOCAB, 9)
    assert widths == [0, 1, 2, 4, 8, 16]


class Waits(TorchDispatchMode):
    """Notes operators whose result's shape or value the host needs: on a GPU each would wait for it."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        is_masked = name in {"index", "index_put_"} and any(
            each is not None and each.dtype is torch.bool for each in args[1]
        )
        if name in self.WAITING or is_masked:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_the_device_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    works = [make_work(seed) for seed in range(40)]
    logits = logits_for(works, np.random.default_rng(1))
    fetched: list[torch.Tensor] = []
    plain = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: fetched.append(tensor) or plain(tensor))
    with Waits() as waits:
        DeviceSampler(CPU, TORCH).accept(works, logits)
    assert waits.seen == []
    assert len(fetched) == 1
    assert fetched[0].numel() < logits.numel() // 4


def test_a_step_that_only_prefills_reads_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    (session,) = build_factory(toy_config(VOCAB, CONTEXT)).build(request([1, 2, 3]))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: pytest.fail("waited"))
    work = Work(session, range(2), False)
    assert DeviceSampler(CPU, TORCH).accept([work], torch.zeros((0, VOCAB))) == [None]


def test_under_the_interpreter() -> None:
    run_under_the_interpreter(__file__)


@pytest.fixture(scope="module")
def device() -> torch.device:
    return kernel_device()


@pytest.mark.gpu
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(SEEDS, st.integers(0, 2**32))
def test_a_step_is_drawn_by_triton_as_on_the_host(device: torch.device, seeds: list[int], seed: int) -> None:
    from kernels import acceptance_triton, sampling_triton

    kernels = Kernels(
        sampling_triton.draw_rows, acceptance_triton.accept_coupled_batch, acceptance_triton.accept_thresholds_batch
    )
    check(kernels, device, seeds, seed)
