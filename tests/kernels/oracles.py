"""Plain-Python statements of the kernels' rules, written from the rules and not from the kernels: slow, obvious."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# Where two ways of adding up may differ: a sum this near a limit decides nothing, unless all its terms are 0 or 1.
ROUNDING = 1e-12


class TooClose(Exception):
    """The case hangs on the last bits of a sum."""


def filtered(logits: Sequence[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float] | None:
    """Probabilities after all filters; None when the row has none."""
    if any(math.isnan(x) or x == math.inf for x in logits) or all(x == -math.inf for x in logits):
        return None
    by_logit = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0.0:
        return [float(i == by_logit[0]) for i in range(len(logits))]
    largest = max(logits)
    weights = [math.exp((x - largest) / temperature) for x in logits]
    exact = set(weights) <= {0.0, 1.0}
    kept = by_logit[:top_k] if top_k > 0 else by_logit
    if top_p < 1.0:
        total = math.fsum(weights[i] for i in kept)
        nucleus, before = [], 0.0
        for i in sorted(kept, key=lambda i: (-weights[i], i)):
            if abs(before - top_p * total) < ROUNDING * total and not exact:
                raise TooClose
            if before < top_p * total:
                nucleus.append(i)
            before += weights[i]
        kept = nucleus
    if min_p > 0.0:
        if any(0.0 < abs(weights[i] - min_p) < ROUNDING for i in kept):
            raise TooClose
        least = min_p * max(weights[i] for i in kept)
        kept = [i for i in kept if weights[i] >= least]
    total = math.fsum(weights[i] for i in kept)
    members = set(kept)
    return [weights[i] / total if i in members else 0.0 for i in range(len(logits))]


def inverse_cdf(probs: Sequence[float], u: float) -> int:
    """The first id of positive probability whose running sum exceeds u times the sum; else the last positive one."""
    total, running = sum(probs), 0.0
    exact = u == 0.0 or set(probs) <= {0.0, 1.0}
    for token, p in enumerate(probs):
        running += p
        if abs(running - u * total) < ROUNDING * total and not exact:
            raise TooClose
        if running > u * total and p > 0.0:
            return token
    return max(token for token, p in enumerate(probs) if p > 0.0)


def penalised(
    logits: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    presence: float = 0.0,
    frequency: float = 0.0,
    repetition: float = 1.0,
    logit_bias: dict[int, float] | None = None,
    min_tokens: int = 0,
    stop_ids: Sequence[int] = (),
) -> list[np.float32]:
    """Logits shaped by a whole history, token by token in float32."""
    shaped = [np.float32(x) for x in logits]
    in_output = Counter(output)
    for token in {*prompt, *output}:
        r = np.float32(repetition)
        x = shaped[token]
        x = np.float32(x * r) if x < 0 else np.float32(x / r)
        count = in_output[token]
        shaped[token] = np.float32(x - np.float32(frequency * count + (presence if count else 0.0)))
    for token, bias in (logit_bias or {}).items():
        shaped[token] = np.float32(shaped[token] + np.float32(bias))
    if len(output) < min_tokens:
        for token in stop_ids:
            shaped[token] = np.float32(-math.inf)
    return shaped


def links(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """First child and next sibling of every node, root first (parents[0] = -1), built from the back."""
    next_token, next_sibling = [-1] * len(parents), [-1] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        next_sibling[node] = next_token[parents[node]]
        next_token[parents[node]] = node
    return next_token, next_sibling


def verify_greedy(parents: Sequence[int], tokens: Sequence[int], target: Sequence[int]) -> tuple[list[int], int]:
    """Accepted rows and bonus. The root is row 0 here: parents[0] = -1 and tokens[0] is the root's own."""
    next_token, next_sibling = links(parents)
    accepted, last = [], 0
    while True:
        node = next_token[last]
        while node != -1 and tokens[node] != target[last]:
            node = next_sibling[node]
        if node == -1:
            return accepted, target[last]
        accepted.append(node)
        last = node


def verify_thresholds(
    parents: Sequence[int],
    tokens: Sequence[int],
    probs: Sequence[Sequence[float]],
    coins: Sequence[float],
    finals: Sequence[float],
    threshold_single: float,
    threshold_acc: float,
) -> tuple[list[int], int]:
    """The sampling rule with its buffer of draft probabilities; rows as in `verify_greedy`, coins by depth."""
    next_token, next_sibling = links(parents)
    rejected = [[0.0] * len(row) for row in probs]
    accepted: list[int] = []
    row, mass, coin = 0, 0.0, coins[0]
    node = next_token[row]
    while node != -1:
        p = probs[row][tokens[node]]
        mass += p
        if p > 0.0 and (coin <= mass / max(threshold_acc, 1e-9) or p >= threshold_single):
            accepted.append(node)
            row, mass, coin = node, 0.0, coins[len(accepted)]
            node = next_token[row]
        else:
            rejected[row][tokens[node]] = p
            node = next_sibling[node]
    left = [max(p - q, 0.0) for p, q in zip(probs[row], rejected[row], strict=True)]
    return accepted, inverse_cdf(left if any(left) else probs[row], finals[len(accepted)])


@dataclass(eq=False)
class Candidate:
    """A drafted path, by its last token."""

    token: int
    score: np.float32
    parent: "Candidate | None"


def grow(num_steps: int, topk: int, likeliest: Callable[[int, int], list[tuple[int, float]]]) -> list[Candidate]:
    """All candidates in the order they arise; `likeliest(step, slot)` are (token, p) pairs."""

    def below(parent: Candidate | None, pairs: list[tuple[int, float]]) -> list[Candidate]:
        above = parent.score if parent else np.float32(1.0)
        ps = [np.float32(0.0 if math.isnan(p) else min(max(p, 0.0), 1.0)) for _, p in pairs]
        return [Candidate(token, np.float32(above * p), parent) for (token, _), p in zip(pairs, ps, strict=True)]

    frontier = below(None, likeliest(0, 0))
    everything = list(frontier)
    for step in range(1, num_steps):
        block = [c for slot, node in enumerate(frontier) for c in below(node, likeliest(step, slot))]
        everything += block
        frontier = sorted(block, key=lambda c: -c.score)[:topk]
    return everything


def likeliest_nodes(everything: list[Candidate], count: int) -> list[Candidate]:
    """The `count` best, in the order they arose."""
    best = sorted(range(len(everything)), key=lambda i: (-everything[i].score, i))[:count]
    return [everything[i] for i in sorted(best)]
