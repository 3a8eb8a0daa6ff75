"""Drafting for a step that has not ended: along its likeliest accepted paths, guesses at the bonus, and trees below.

Everything lies on forks of the sessions' rows, which are given back at once: when the verdict comes, committed tokens
are run again on the target's own states. A verdict that comes meanwhile ends the work between two steps, unless what is
being drafted is just what it commits: then it is finished, since verify waits for no more than that.

A language model runs a path's tokens in one step, and with them what was committed last. So does a head where it is
known what came out of the path's nodes when their tree was drafted: rows go on from the head's own states then, but
from the corrected one at the root where that was run before. For a tree drafted from the same root these are the states
that row after row would give. Where nothing is known, a head runs row after row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from draft_service.drafters.base import AheadRequest, Draft
from draft_service.drafters.carrying import Carried
from draft_service.drafters.features import Piece, joined
from draft_service.drafters.growing import slots_needed
from draft_service.drafters.kv import CacheRows, NoRoom
from draft_service.drafters.models import Tip
from draft_service.drafters.outcomes import likely_ends, likely_outcomes
from draft_service.drafters.paths import Behind, End, Start, Trunk, trunks_of
from draft_service.drafters.trees import TreeGrower, Wanted
from engine.batch import Segment
from outrider.tree import ROOT
from outrider.wire import Ids


@dataclass(slots=True, eq=False)
class _Outcome:
    """A way that request number `request` may end: accepted tokens and the bonus, int32 [n], and where that is."""

    request: int
    start: Start  # behind with the bonus, until that is run
    assumed: Ids


class Preempted(Exception):
    """Nobody needs the drafts under way any more: a verdict came that left them, or who asked has gone."""


def trees_ahead(
    grower: TreeGrower, requests: Sequence[AheadRequest], starts: Sequence[Start | None]
) -> list[list[Draft]]:
    """Trees of each request, likeliest outcome first; none where there is no start, or no room for forks.

    None at all when a verdict leaves all of one session's outcomes.
    """
    return _Ahead(grower, requests).run(starts)


@dataclass(slots=True, eq=False)
class _Ahead:
    """One call's work. `opened`: forks to give back, in the order in which they were made."""

    grower: TreeGrower
    requests: Sequence[AheadRequest]
    opened: list[CacheRows] = field(default_factory=list)
    paths: dict[int, list[Ids]] = field(default_factory=dict)  # by request: what its outcomes assume, as far as known

    def run(self, starts: Sequence[Start | None]) -> list[list[Draft]]:
        """See trees_ahead."""
        drafts: list[list[Draft]] = [[] for _ in self.requests]
        try:
            ends = self._ends(starts)
            self._follow(list({id(end.trunk): end.trunk for end in ends}.values()))
            outcomes = self._choose(ends)
            if self.grower.model.grower is None:  # else it is run in the call that grows the trees
                self._run_bonus(outcomes)
            for outcome, draft in self._grown(outcomes):
                drafts[outcome.request].append(replace(draft, assumed=outcome.assumed))
        except Preempted:
            return [[] for _ in self.requests]
        finally:
            for rows in reversed(self.opened):
                self.grower.model.cache.close(rows)
        return drafts

    def _check(self) -> None:
        for index, paths in self.paths.items():
            if all(map(self.requests[index].left, paths)):
                raise Preempted

    def _ends(self, starts: Sequence[Start | None]) -> list[End]:
        """Likely ends, on as few trunks as hold them: at most max_outcomes for each, as many as there is room for."""
        cache = self.grower.model.cache
        room = min(cache.num_free, self.grower.model.max_batch_tokens)
        found: list[End] = []
        for index, (request, start) in enumerate(zip(self.requests, starts, strict=True)):
            if start is None:
                continue
            tree = request.verifying.tree
            room -= start.num_behind
            ends: list[tuple[list[int], float]] = []
            for node, chance in likely_ends(tree, request.verifying.probabilities, request.max_assumed - 1):
                nodes = tree.path(node)
                needed = self._slots_below(request, start, len(nodes) + 1)
                if needed is not None and needed <= room:
                    room -= len(nodes) + 1
                    ends.append((nodes, chance))
            # Rows of committed tokens are run with one path: other paths' rows could not see them yet.
            most = request.max_outcomes if start.behind is None else 1
            for nodes in trunks_of([nodes for nodes, _ in ends], most):
                try:
                    rows = self._fork(start.rows, start.rows.num_rows)
                except NoRoom:
                    return found
                trunk = Trunk(index, nodes, rows, start, [] if start.tip is None else [start.tip])
                on_it = [(own, chance) for own, chance in ends if own == nodes[: len(own)]]
                ends = [end for end in ends if end not in on_it]
                found += [End(trunk, len(own), chance) for own, chance in on_it]
                self.paths.setdefault(index, []).extend(tree.tokens[own].astype(np.int32) for own, _ in on_it)
        return found

    def _slots_below(self, request: AheadRequest, start: Start, num_assumed: int) -> int | None:
        """Slots for so many assumed tokens and a tree below; None where no tree can be there."""
        session = request.verifying.session
        num_rows = start.rows.num_rows + start.num_behind
        num_steps, topk = self.grower.steps(
            num_rows, session.wishes, max_depth=session.max_depth(num_assumed), num_nodes=request.num_nodes
        )
        if min(num_steps, topk) < 1 or num_assumed > self.grower.model.cache.max_len - num_rows:
            return None
        return num_assumed + slots_needed(num_steps, topk)

    def _follow(self, trunks: Sequence[Trunk]) -> None:
        """Runs the trunks' paths: all at once where that can be, then row after row."""
        whole: list[tuple[Trunk, int, torch.Tensor | None]] = []
        for trunk in trunks:
            known, states = self._path_states(trunk)
            if known or trunk.start.behind is not None:
                whole.append((trunk, known, states))
        if whole:
            self._extend(whole)
        while left := [trunk for trunk in trunks if trunk.num_run < len(trunk.nodes)]:
            self._extend([(trunk, 1, trunk.tips[-1].states) for trunk in left])

    def _path_states(self, trunk: Trunk) -> tuple[int, torch.Tensor | None]:
        """How many of the path's first rows can be run at once, and what they go on from, [that many, hidden].

        Where the root's own row is not run yet, its state is the one that it had when its tree was drafted.
        """
        count, verifying, tip = len(trunk.nodes), self.requests[trunk.request].verifying, trunk.start.tip
        if not count or not self.grower.model.reads_states:
            return count, None
        root = None if tip is None else tip.states
        if isinstance(memo := verifying.memo, Carried):
            above = [int(verifying.nodes[node]) for node in trunk.nodes[:-1]]
            if root is None:
                whole = memo.rows([verifying.root, *above])
                root = memo.rows([verifying.root]) if whole is None else None
            else:
                below = memo.rows(above)
                whole = None if below is None else torch.cat([root, below.to(root.dtype)])
            if whole is not None:
                return count, whole
        return (0, None) if root is None else (1, root)

    def _extend(self, pieces: Sequence[tuple[Trunk, int, torch.Tensor | None]]) -> None:
        """Runs the next nodes of each trunk, so many, from these states; first what its session is behind with."""
        self._check()
        model, segments, inputs = self.grower.model, [], []
        fresh = [trunk.start.behind is not None and not trunk.tips for trunk, _, _ in pieces]
        for (trunk, count, states), is_first in zip(pieces, fresh, strict=True):
            tree, done = self.requests[trunk.request].verifying.tree, max(0, trunk.num_run)
            words = tree.tokens[trunk.nodes[done : done + count]].astype(np.int32)
            prefix_len, num_logits = trunk.rows.num_rows, count
            if is_first and (behind := trunk.start.behind) is not None:
                words, num_logits = np.concatenate([behind.words, words]), count + 1
                features = behind.inputs()
                inputs.append(None if features is None else model.fuse(features.rows))
            inputs.append(states)
            slots = model.cache.append(trunk.rows, len(words))
            segments.append(Segment(trunk.rows.table_row, prefix_len, words, slots, num_logits=num_logits))
        tips = model.run(segments, _joined(inputs), self.grower.num_top)
        row = 0
        for (trunk, count, _), is_first in zip(pieces, fresh, strict=True):
            if is_first and (behind := trunk.start.behind) is not None:
                model.cache.adopt(trunk.start.rows, trunk.rows, len(behind.words))
                behind.done(Tip(tips, row))
            trunk.tips += [Tip(tips, row + i) for i in range(count + is_first)]
            row += count + is_first

    def _choose(self, ends: Sequence[End]) -> list[_Outcome]:
        """The likeliest outcomes of each request, each on rows of its own that end before the bonus."""
        chosen: list[tuple[End, int]] = []
        guesses = self._guesses(ends)
        for index in sorted({end.trunk.request for end in ends}):
            own = [end for end in ends if end.trunk.request == index]
            own_guesses = [found for end, found in zip(ends, guesses, strict=True) if end.trunk.request == index]
            best = likely_outcomes([end.chance for end in own], own_guesses, self.requests[index].max_outcomes)
            chosen += [(own[at], token) for at, token in best]
            self.paths[index] = []
        outcomes: list[_Outcome] = []
        lent: set[int] = set()  # trunks whose own rows an outcome goes on with: the first that ends where they do
        for end, token in chosen:
            trunk = end.trunk
            whole = end.depth == len(trunk.nodes) and id(trunk) not in lent
            try:
                rows = trunk.rows if whole else self._fork(trunk.rows, trunk.num_below + end.depth)
            except NoRoom:
                continue
            if whole:
                lent.add(id(trunk))
            tree = self.requests[trunk.request].verifying.tree
            assumed = np.append(tree.tokens[trunk.nodes[: end.depth]], token).astype(np.int32)
            self.paths[trunk.request].append(assumed)
            bonus = Behind(assumed[-1:], partial(_states_of, trunk.tips[end.depth]), lambda _: None, are_states=True)
            outcomes.append(_Outcome(trunk.request, Start(rows, None, bonus), assumed))
        return outcomes

    def _guesses(self, ends: Sequence[End]) -> list[list[tuple[int, float]]]:
        """Tokens that may follow where acceptance ends: none that a child holds, for that would have been accepted."""
        tips = [end.trunk.tips[end.depth] for end in ends]
        # What ran together is read together: on a device each reading is waited for.
        named = {key: batch.named() for key, batch in {id(tip.batch): tip.batch for tip in tips}.items()}
        found: list[list[tuple[int, float]]] = []
        for end, tip in zip(ends, tips, strict=True):
            links = self.requests[end.trunk.request].verifying.tree.links
            offered = links.get(end.trunk.nodes[end.depth - 1] if end.depth else ROOT, {})
            found.append([guess for guess in named[id(tip.batch)][tip.row] if guess[0] not in offered])
        return found

    def _run_bonus(self, outcomes: list[_Outcome]) -> None:
        """Runs each outcome's bonus token; those that leave no room for a tree are dropped."""
        outcomes[:] = [outcome for outcome, _ in self._with_room(outcomes)]
        if not outcomes:
            return
        self._check()
        segments, inputs = [], []
        for start in (outcome.start for outcome in outcomes):
            assert start.behind is not None
            table_row, last = start.rows.table_row, start.rows.num_rows - 1
            slots = self.grower.model.cache.slot_table[table_row, last : last + 1]
            segments.append(Segment(table_row, last, start.behind.words, slots))
            inputs.append(start.behind.inputs())
        pieces = [piece for piece in inputs if piece is not None]
        tips = self.grower.model.run(segments, joined(pieces).rows if pieces else None, self.grower.num_top)
        for row, outcome in enumerate(outcomes):
            outcome.start = Start(outcome.start.rows, Tip(tips, row))

    def _grown(self, outcomes: Sequence[_Outcome]) -> list[tuple[_Outcome, Draft]]:
        """The trees below outcomes, of those that have room."""
        wanted = self._with_room(outcomes)
        grown = self.grower.grow([tree for _, tree in wanted], self._check)
        return [(outcome, draft) for (outcome, _), draft in zip(wanted, grown, strict=True)]

    def _with_room(self, outcomes: Sequence[_Outcome]) -> list[tuple[_Outcome, Wanted]]:
        """Outcomes and trees to grow below them, of which any one has room; rows that are behind have theirs."""
        cache, found, most = self.grower.model.cache, [], 0
        for outcome in outcomes:
            tree = self._plan(outcome)
            if tree is None or max(most, tree.slots) + tree.start.num_behind > cache.num_free:
                continue
            most = max(most, tree.slots)
            if tree.start.num_behind:
                cache.append(tree.start.rows, tree.start.num_behind)
            found.append((outcome, tree))
        return found

    def _plan(self, outcome: _Outcome) -> Wanted | None:
        """The tree to grow below an outcome."""
        request = self.requests[outcome.request]
        session = request.verifying.session
        return self.grower.plan(
            outcome.start, session.wishes, max_depth=session.max_depth(len(outcome.assumed)),
            num_nodes=request.num_nodes,
        )  # fmt: skip

    def _fork(self, rows: CacheRows, num_rows: int) -> CacheRows:
        forked = self.grower.model.cache.fork(rows, num_rows)
        self.opened.append(forked)
        return forked


def _states_of(tip: Tip) -> Piece | None:
    states = tip.batch.states
    return None if states is None else Piece(states, tip.row, tip.row + 1)


def _joined(states: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    found = [own for own in states if own is not None]
    return torch.cat([own.to(found[0].dtype) for own in found]) if found else None
