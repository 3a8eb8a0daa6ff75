"""Drafting for a step that has not ended: along its likeliest accepted paths, a guess at the bonus, and trees below.

Everything lies on forks of the sessions' rows, which are given back at once: when the verdict comes, committed tokens
are run again on the target's own states. A verdict that comes meanwhile ends the work between two steps, unless what is
being drafted is just what it commits: then it is finished, since verify waits for no more than that.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import numpy as np
import torch

from draft_service.drafters.base import AheadRequest, Draft
from draft_service.drafters.kv import NoRoom, Sequence
from draft_service.drafters.models import Tips, advance
from draft_service.drafters.outcomes import likely_outcomes
from draft_service.drafters.trees import TreeGrower
from outrider.wire import Ids


@dataclass(frozen=True, slots=True)
class Start:
    """A session's rows, run up to its newest committed token, and the last one's tips."""

    rows: Sequence
    tips: Tips


@dataclass(slots=True)
class _Outcome:
    """A way that request number `request` may end: accepted tokens int32 [n], then none of those that were offered."""

    request: int
    rows: Sequence
    tips: Tips
    assumed: Ids
    offered: set[int]


class Preempted(Exception):
    """A verdict has come, and a session needs other drafts than those under way."""


def trees_ahead(grower: TreeGrower, requests: Many[AheadRequest], starts: Many[Start | None]) -> list[list[Draft]]:
    """For each request its trees, likeliest outcome first; none where there is no start, or no room for forks.

    None at all when a verdict leaves all of one session's outcomes.
    """
    drafts: list[list[Draft]] = [[] for _ in requests]
    outcomes = _outcomes(grower, requests, starts)

    def check() -> None:
        for index, request in enumerate(requests):
            own = [outcome for outcome in outcomes if outcome.request == index]
            if own and all(request.left(outcome.assumed) for outcome in own):
                raise Preempted

    try:
        _follow_paths(grower, outcomes, check)
        check()
        guessed = _guess_bonus(grower, outcomes)
        trees = []
        for outcome in guessed:
            request = requests[outcome.request]
            session = request.verifying.session
            trees.append(
                grower.plan(
                    outcome.rows, outcome.tips, session.wishes, max_depth=session.max_depth(len(outcome.assumed)),
                    num_nodes=request.num_nodes,
                )
            )  # fmt: skip
        room = grower.model.cache.num_free
        wanted = [(o, tree) for o, tree in zip(guessed, trees, strict=True) if tree is not None and tree.slots <= room]
        for (outcome, _), draft in zip(wanted, grower.grow([tree for _, tree in wanted], check), strict=True):
            drafts[outcome.request].append(replace(draft, assumed=outcome.assumed))
    except Preempted:
        return [[] for _ in requests]
    finally:
        for outcome in outcomes:
            grower.model.cache.close(outcome.rows)
    return drafts


def _outcomes(grower: TreeGrower, requests: Many[AheadRequest], starts: Many[Start | None]) -> list[_Outcome]:
    """Likely outcomes on forks, as many as pool, table and one step have room for."""
    cache = grower.model.cache
    room = min(cache.num_free, grower.model.max_batch_tokens)
    found: list[_Outcome] = []
    for index, (request, start) in enumerate(zip(requests, starts, strict=True)):
        if start is None:
            continue
        tree, session = request.verifying.tree, request.verifying.session
        nodes = likely_outcomes(tree, request.verifying.probabilities, request.max_assumed - 1)
        for node in nodes[: request.max_outcomes]:
            path = tree.path(node)
            needed = len(path) + 1
            below = grower.plan(
                start.rows, start.tips, session.wishes, max_depth=session.max_depth(needed),
                num_nodes=request.num_nodes,
            )  # fmt: skip
            fits = below is not None and needed + below.slots <= room
            if not fits or needed > cache.max_len - start.rows.num_rows:
                continue
            try:
                rows = cache.fork(start.rows)
            except NoRoom:
                return found
            room -= needed
            offered = {int(tree.tokens[child]) for child in tree.children(node)}
            found.append(_Outcome(index, rows, start.tips, tree.tokens[path].astype(np.int32), offered))
    return found


def _follow_paths(grower: TreeGrower, outcomes: Many[_Outcome], check: Callable[[], None]) -> None:
    """Runs the accepted tokens: all at once, or, where each row goes on from the one before, row by row."""
    longest = max((len(outcome.assumed) for outcome in outcomes), default=0)
    step = 1 if grower.model.reads_states else max(1, longest)
    for first in range(0, longest, step):
        check()
        running = [outcome for outcome in outcomes if len(outcome.assumed) > first]
        _run(grower, running, [outcome.assumed[first : first + step] for outcome in running])


def _guess_bonus(grower: TreeGrower, outcomes: Many[_Outcome]) -> list[_Outcome]:
    """Appends to each the likeliest token that its tree did not offer there; those that have one."""
    guessed: list[_Outcome] = []
    for outcome in outcomes:
        bonus = next((token for token in outcome.tips.tokens[0].tolist() if token not in outcome.offered), None)
        if bonus is not None:
            outcome.assumed = np.append(outcome.assumed, np.int32(bonus))
            guessed.append(outcome)
    if guessed:
        _run(grower, guessed, [outcome.assumed[-1:] for outcome in guessed])
    return guessed


def _run(grower: TreeGrower, outcomes: Many[_Outcome], tokens: Many[Ids]) -> None:
    states = [outcome.tips.states for outcome in outcomes if outcome.tips.states is not None]
    rows = [outcome.rows for outcome in outcomes]
    tips = advance(grower.model, rows, tokens, torch.cat(states) if states else None, grower.num_top)
    for index, outcome in enumerate(outcomes):
        outcome.tips = tips.at(slice(index, index + 1))
