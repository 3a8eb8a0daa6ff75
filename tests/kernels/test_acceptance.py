from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kernels.acceptance import Accepted, accept_coupled_batch, accept_thresholds, walk
from kernels.penalties import History, Penalties, penalise
from kernels.philox import COIN_LANE, FINAL_LANE, uniform, uniform_one
from kernels.sampling import Filters, draw
from tests.kernels import oracles

VOCAB = 4


Tree = tuple[list[int], list[int]]


def grown(nodes: list[tuple[int, int]]) -> Tree:
    """(parents, tokens) as on the wire; what would repeat a sibling is left out."""
    parents: list[int] = []
    tokens: list[int] = []
    for choice, token in nodes:
        parent = choice % (len(parents) + 1) - 1
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
    return parents, tokens


TREES = st.lists(st.tuples(st.integers(0, 100), st.integers(0, VOCAB - 1)), max_size=10).map(grown)


def with_root(parents: list[int], tokens: list[int]) -> tuple[list[int], list[int]]:
    return [-1, *(p + 1 for p in parents)], [-7, *tokens]


def links(parents: Sequence[int], tokens: Sequence[int]) -> dict[int, dict[int, int]]:
    """Links as `walk` takes them."""
    found: dict[int, dict[int, int]] = {}
    for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
        found.setdefault(parent, {})[token] = node
    return found


def accept_coupled(parents: Sequence[int], tokens: Sequence[int], target: Sequence[int]) -> Accepted:
    """The coupled rule for n nodes where the target's token is known at all n + 1 rows."""
    return walk(links(parents, tokens), target.__getitem__)


def test_worked_example() -> None:
    # Tree of the worked vectors: 5 -> 10 -> 20, 5 -> 11 -> 22 -> 32.
    parents, tokens = [-1, -1, 0, 1, 3], [10, 11, 20, 22, 32]
    target = [11, 20, 22, 0, 99, 0]
    assert accept_coupled(parents, tokens, target) == Accepted([1, 3], 99)
    assert oracles.verify_greedy(*with_root(parents, tokens), target) == ([2, 4], 99)


def test_without_nodes_there_is_only_the_bonus() -> None:
    assert accept_coupled([], [], [6]) == Accepted([], 6)


def test_a_row_without_a_distribution_ends_the_walk() -> None:
    assert accept_coupled([-1, 0], [3, 1], [3, -1, 1]) == Accepted([0], -1)


@settings(deadline=None)
@given(TREES, st.lists(st.integers(0, VOCAB - 1), min_size=11, max_size=11))
def test_coupled_follows_the_links(tree: Tree, target: list[int]) -> None:
    parents, tokens = tree
    target = target[: len(tokens) + 1]
    rows, bonus = oracles.verify_greedy(*with_root(parents, tokens), target)
    visited: list[int] = []

    def draw_at(row: int) -> int:
        visited.append(row)
        return target[row]

    assert accept_coupled(parents, tokens, target) == Accepted([row - 1 for row in rows], bonus)
    assert walk(links(parents, tokens), draw_at) == accept_coupled(parents, tokens, target)
    assert visited == [0, *rows]


@settings(deadline=None)
@given(st.lists(st.tuples(TREES, st.lists(st.integers(-1, VOCAB - 1), min_size=11, max_size=11)), min_size=1,
                max_size=5), st.integers(0, 3))  # fmt: skip
def test_batch_equals_one_by_one(sessions: list[tuple[Tree, list[int]]], spare: int) -> None:
    width = max(len(tokens) for (_, tokens), _ in sessions) + spare
    padding = 3  # what stands in unused places must not matter: tokens that could match, parents that do not exist
    parents = torch.tensor([p + [width + 50] * (width - len(p)) for (p, _), _ in sessions], dtype=torch.int32)
    tokens = torch.tensor([t + [padding] * (width - len(t)) for (_, t), _ in sessions], dtype=torch.int32)
    target = torch.tensor([(t + [padding] * width)[: width + 1] for _, t in sessions])
    num_nodes = torch.tensor([len(t) for (_, t), _ in sessions])
    batch = accept_coupled_batch(parents, tokens, num_nodes, target)
    for i, ((own_parents, own_tokens), own_target) in enumerate(sessions):
        alone = accept_coupled(own_parents, own_tokens, own_target[: len(own_tokens) + 1])
        count = int(batch.num_accepted[i])
        assert batch.nodes[i].tolist() == alone.nodes + [-1] * (width - len(alone.nodes))
        assert (count, int(batch.bonus[i])) == (len(alone.nodes), alone.bonus)


@dataclass
class TinyTarget:
    """A target whose logits depend on all that came before, with everything that shapes its distribution."""

    seed: int
    filters: Filters
    penalties: Penalties
    prompt: tuple[int, ...] = (1, 2)

    def token(self, history: History, output: list[int], path: list[int]) -> int:
        """The target's token after output and path; `history` holds prompt and output."""
        state = 1469598103934665603
        for token in (*self.prompt, *output, *path):
            state = (state ^ (token + 1)) * 1099511628211 % 2**64
        row = np.random.default_rng(state).normal(size=VOCAB).astype(np.float32) * 2
        penalise(row, self.penalties, history, path)
        return draw(row, self.filters, uniform_one(self.seed, 0, len(output) + len(path), COIN_LANE))

    def verify(self, history: History, output: list[int], parents: list[int], tokens: list[int]) -> list[int]:
        """What one round commits."""

        def path_to(row: int) -> list[int]:
            return [] if row == 0 else [*path_to(parents[row - 1] + 1), tokens[row - 1]]

        accepted = walk(links(parents, tokens), lambda row: self.token(history, output, path_to(row)))
        return [tokens[node] for node in accepted.nodes] + [accepted.bonus]


@settings(deadline=None)
@given(
    st.integers(0, 2**64 - 1),
    st.sampled_from([Filters(temperature=0.0), Filters(), Filters(temperature=1.4, top_p=0.9), Filters(top_k=3)]),
    st.sampled_from([{}, {"frequency": 1.5, "repetition": 1.4}, {"min_tokens": 6, "stop_ids": [0], "presence": 1.0}]),
    st.lists(TREES, min_size=1, max_size=8),
)
def test_output_is_that_of_plain_sampling_whatever_the_tree(
    seed: int, filters: Filters, shaping: dict[str, Any], drafted: list[Tree]
) -> None:
    target = TinyTarget(seed, filters, Penalties.build(**shaping))
    history, output = History(target.prompt), []
    for parents, tokens in drafted:
        committed = target.verify(history, output, parents, tokens)
        output += committed
        history.commit(committed)

    plain_history, plain = History(target.prompt), []
    while len(plain) < len(output):
        plain.append(target.token(plain_history, plain, []))
        plain_history.commit(plain[-1:])
    assert output == plain


def random_probs(rng: np.random.Generator, num_rows: int) -> np.ndarray:
    probs = rng.dirichlet(np.full(VOCAB, 0.6), size=num_rows)
    probs[rng.random(probs.shape) < 0.2] = 0.0
    probs[~probs.any(axis=1), 0] = 1.0
    return probs / probs.sum(axis=1, keepdims=True)


@settings(deadline=None)
@given(TREES, st.integers(0, 2**31), st.sampled_from([0.0, 0.3, 0.8, 1.0]), st.sampled_from([0.0, 0.4, 0.9, 1.0]))
def test_thresholds_equal_a_direct_simulation(
    tree: Tree, seed: int, threshold_single: float, threshold_acc: float
) -> None:
    parents, tokens = tree
    rng = np.random.default_rng(seed)
    probs = random_probs(rng, len(tokens) + 1)
    coins, finals = rng.random(12).tolist(), rng.random(12).tolist()
    visited: list[int] = []

    def probs_at(row: int) -> np.ndarray:
        visited.append(row)
        return probs[row]

    actual = accept_thresholds(
        parents, tokens, probs_at, coins.__getitem__, finals.__getitem__,
        threshold_single=threshold_single, threshold_acc=threshold_acc,
    )  # fmt: skip
    rows, bonus = oracles.verify_thresholds(
        *with_root(parents, tokens), probs.tolist(), coins, finals, threshold_single, threshold_acc
    )
    assert actual == Accepted([row - 1 for row in rows], bonus)
    assert visited == [0, *rows]


def test_thresholds_of_one_are_lossless() -> None:
    # Two levels; the pair of first two tokens must follow p(first) * p(second | first), whatever was drafted.
    parents, tokens = [-1, -1, 0, 0, 1], [2, 0, 1, 3, 1]
    rng = np.random.default_rng(2)
    first, after = rng.dirichlet(np.ones(VOCAB)), rng.dirichlet(np.ones(VOCAB), size=VOCAB)
    probs = np.stack([first, after[2], after[0], *rng.dirichlet(np.ones(VOCAB), size=3)])
    num_trials = 20_000
    coins, finals = (uniform(7, 0, np.arange(3 * num_trials), lane).reshape(-1, 3) for lane in (COIN_LANE, FINAL_LANE))
    later = rng.random(num_trials)
    pairs: Counter[tuple[int, int]] = Counter()
    for trial in range(num_trials):
        accepted = accept_thresholds(
            parents, tokens, probs.__getitem__, coins[trial].__getitem__, finals[trial].__getitem__,
            threshold_single=1.0, threshold_acc=1.0,
        )  # fmt: skip
        output = [tokens[node] for node in accepted.nodes] + [accepted.bonus]
        if len(output) == 1:  # the next round would draw it
            output.append(int(np.searchsorted(np.cumsum(after[output[0]]), later[trial] * after[output[0]].sum())))
        pairs[output[0], output[1]] += 1
    expected = {(a, b): first[a] * after[a, b] * num_trials for a in range(VOCAB) for b in range(VOCAB)}
    assert stats.chisquare([pairs[k] for k in expected], list(expected.values())).pvalue > 1e-4


def first_token_distribution(p: np.ndarray, drafts: list[int], single: float, acc: float) -> np.ndarray:
    """The exact distribution below one parent: the part of the coin's range that each child takes, then the rest."""
    out, left, reached, at = np.zeros(VOCAB), p.copy(), 0.0, 0.0
    for token in drafts:
        reached += p[token]
        upto = 1.0 if p[token] >= single else min(1.0, reached / acc)
        out[token] += max(0.0, upto - at)
        at = max(at, upto)
        left[token] = 0.0
    return out + (1.0 - at) * left / left.sum()


@pytest.mark.parametrize(("single", "acc"), [(1.0, 1.0), (0.3, 1.0), (1.0, 0.6), (0.25, 0.5), (0.25, 1.0)])
def test_lower_thresholds_bias_exactly_as_the_rule_says(single: float, acc: float) -> None:
    p = np.array([0.1, 0.28, 0.4, 0.22])
    drafts = [3, 1]
    num_trials = 10_000
    coins, finals = uniform(3, 1, np.arange(num_trials), COIN_LANE), uniform(3, 1, np.arange(num_trials), FINAL_LANE)
    counts = np.zeros(VOCAB)
    for trial in range(num_trials):
        accepted = accept_thresholds(
            [-1, -1], drafts, lambda row: p, lambda depth, t=trial: coins[t], lambda depth, t=trial: finals[t],
            threshold_single=single, threshold_acc=acc,
        )  # fmt: skip
        counts[drafts[accepted.nodes[0]] if accepted.nodes else accepted.bonus] += 1
    expected = first_token_distribution(p, drafts, single, acc) * num_trials
    assert not counts[expected == 0].any()
    assert stats.chisquare(counts[expected > 0], expected[expected > 0]).pvalue > 1e-4


def always(value: float) -> Any:
    return lambda depth: value


def test_thresholds_never_take_a_token_of_probability_zero() -> None:
    p = np.array([0.0, 1.0, 0.0, 0.0])
    for coin in (0.0, 0.999):
        accepted = accept_thresholds(
            [-1, -1], [0, 2], lambda row: p, always(coin), always(0.5), threshold_single=0.0, threshold_acc=0.0
        )
        assert accepted == Accepted([], 1)


def test_thresholds_survive_rounding_that_rejects_everything() -> None:
    p = np.array([0.5, 0.5 - 2**-52, 0.0, 0.0])
    accepted = accept_thresholds(
        [-1, -1], [0, 1], lambda row: p, always(1 - 2**-53), always(0.9), threshold_single=1.0, threshold_acc=1.0
    )
    assert accepted == Accepted([], 1)


def test_thresholds_stop_at_a_row_without_a_distribution() -> None:
    p = np.array([0.0, 1.0, 0.0, 0.0])
    accepted = accept_thresholds(
        [-1, 0],
        [1, 1],
        lambda row: None if row else p,
        always(0.5),
        always(0.5),
        threshold_single=1.0,
        threshold_acc=1.0,
    )
    assert accepted == Accepted([0], -1)
