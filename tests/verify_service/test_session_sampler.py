"""What is accepted of a tree, and the bonus, are what plain decoding would have drawn along the same path."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.sampling import SamplingParams
from outrider.tree import TokenTree
from tests.fake_drafters import random_draft
from tests.fakes import ToyModel
from verify_service.session_sampler import SessionSampler

VOCAB = 12
MODEL = ToyModel(vocab_size=VOCAB, order=3)


def make_sampler(
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    *,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> SessionSampler:
    return SessionSampler(
        params,
        seed=params.seed or 0,
        choice_index=0,
        stop_ids=frozenset(params.stop_token_ids),
        prompt=np.array(prompt, np.int32),
        resumed=np.array(output, np.int32),
        threshold_single=threshold_single,
        threshold_acc=threshold_acc,
    )


def rows_of(tree: TokenTree, known: list[int]) -> np.ndarray:
    """Logits [n + 1, V]: of the root, then of each node along its own path."""
    paths = [[], *([int(tree.tokens[n]) for n in tree.path(node)] for node in range(len(tree)))]
    return np.stack([MODEL.logits([*known, *path]) for path in paths])


@settings(max_examples=300, deadline=None)
@given(
    temperature=st.sampled_from([0.0, 0.6, 1.5]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.7]),
    presence=st.sampled_from([0.0, 1.0]),
    repetition=st.sampled_from([1.0, 1.3]),
    min_tokens=st.sampled_from([0, 6]),
    seed=st.integers(0, 2**64 - 1),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    split=st.integers(0, 5),
    shape=st.integers(0, 2**32),
)
def test_a_tree_yields_a_stretch_of_plain_decoding(
    temperature: float, top_k: int, top_p: float, presence: float, repetition: float, min_tokens: int, seed: int,
    prompt: list[int], split: int, shape: int,
) -> None:  # fmt: skip
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        presence_penalty=presence,
        repetition_penalty=repetition,
        min_tokens=min_tokens,
        stop_token_ids=(1, 2),
        seed=seed,
    )
    endless = MODEL.decode(prompt, params, seed=seed, stop_ids=(), max_len=len(prompt) + 20)
    if min_tokens:  # the stop ids are masked at first, then end the output
        endless = MODEL.decode(prompt, params, seed=seed, stop_ids=(1, 2), max_len=len(prompt) + 20)
    split = min(split, len(endless) - 1)
    output, coming = endless[:split], endless[split:]
    tree = random_draft(coming, VOCAB, random.Random(shape), 10).tree
    rows = rows_of(tree, prompt + output)
    outcome = make_sampler(params, prompt, output).accept(rows, tree, split)
    # Where the forward pass has named the highest logits, they are what counts if nothing else does.
    named = rows.argmax(axis=1).tolist()
    assert make_sampler(params, prompt, output).accept(rows, tree, split, named) == outcome
    drawn = [*tree.tokens[outcome.nodes].tolist(), outcome.bonus]
    common = min(len(drawn), len(coming))
    assert drawn[:common] == coming[:common]
    assert all(tree.parents[node] == above for node, above in zip(outcome.nodes, [-1, *outcome.nodes], strict=False))
    # The walk ends only where no child holds the token drawn.
    last = outcome.nodes[-1] if outcome.nodes else -1
    assert tree.child(last, outcome.bonus) is None


def test_penalties_count_what_was_committed_since() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    told, resumed = make_sampler(params, [1], []), make_sampler(params, [1], [3, 3, 7])
    told.commit([3, 3])
    told.commit([7])
    rows = rows_of(TokenTree.empty(), [1, 3, 3, 7])
    assert told.accept(rows, TokenTree.empty(), 3) == resumed.accept(rows, TokenTree.empty(), 3)


def test_rows_that_the_walk_does_not_visit_are_not_looked_at() -> None:
    tree = TokenTree(np.array([0, 1, 2], np.int32), np.array([-1, -1, -1], np.int32))
    rows = rows_of(tree, [5])
    best = int(rows[0].argmax())
    for node in range(3):
        if tree.tokens[node] != best:
            rows[node + 1] = math.nan
    assert make_sampler(SamplingParams(temperature=0.0), [5], []).accept(rows, tree, 0).bonus >= 0


def test_lower_thresholds_accept_more_than_the_coin_does_but_greedy_ignores_them() -> None:
    tree = TokenTree.chain(np.array([4, 4, 4], np.int32))
    rows = np.zeros((4, VOCAB), np.float32)
    sampled, greedy = SamplingParams(temperature=1.0, seed=1), SamplingParams(temperature=0.0)
    assert make_sampler(sampled, [0], []).accept(rows, tree, 0).nodes == []
    eager = make_sampler(sampled, [0], [], threshold_single=0.05)
    assert eager.accept(rows, tree, 0).nodes == [0, 1, 2]
    scaled = make_sampler(sampled, [0], [], threshold_acc=0.0)
    assert scaled.accept(rows, tree, 0).nodes == [0, 1, 2]
    assert make_sampler(greedy, [0], [], threshold_single=0.05).accept(rows, tree, 0).nodes == []


def test_node_probabilities_are_those_of_each_token_given_its_path() -> None:
    tree = TokenTree(np.array([3, 4, 5], np.int32), np.array([-1, 0, -1], np.int32))
    shown = make_sampler(SamplingParams(), [1], []).node_probabilities(rows_of(tree, [1]), tree)
    given_root = torch.softmax(torch.from_numpy(MODEL.logits([1]).astype(np.float64)), 0)
    given_three = torch.softmax(torch.from_numpy(MODEL.logits([1, 3]).astype(np.float64)), 0)
    assert shown == pytest.approx([float(given_root[3]), float(given_three[4]), float(given_root[5])])
