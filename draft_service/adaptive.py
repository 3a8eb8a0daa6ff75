"""SGLang's --speculative-adaptive: the steps of a chain follow how many drafts are accepted, by tiers of batch size.

In each tier a moving average of the drafts accepted per request is kept; after some batches, and then every few, the
steps become the smallest candidate that leaves room for one more than the average. 0 steps: no speculation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draft_service.drafters.shape import TreeShape
from draft_service.overlap import NO_OVERLAP, Overlap
from draft_service.planning import Plan, note_overlap
from draft_service.session import Extension, Grown
from outrider.tiers import Tier


@dataclass(slots=True)
class _State:
    """State of one tier."""

    steps: int
    ema: float = 0.0
    batches: int = 0


class AdaptivePlanner:
    """Implements planning.Planner. apply: tells the drafter of a shape."""

    def __init__(
        self, tiers: dict[int, Tier], steps: int, apply: Callable[[TreeShape], object],
        overlap: Overlap = NO_OVERLAP,
    ) -> None:  # fmt: skip
        self.decisions: Counter[str] = Counter()
        self._tiers = tiers
        self._apply = apply
        self._overlap = overlap
        self._states = {
            size: _State(min(tier.candidate_steps, key=lambda candidate: abs(candidate - steps)))
            for size, tier in tiers.items()
        }
        shape = TreeShape(max(steps, 1), 1, max(steps, 1) + 1)
        self.current = Plan(shape, speculate=steps > 0, outcomes=overlap.outcomes([]) if steps else 0)

    def meet(self, sessions: int) -> None:
        """Does nothing: the number of sessions counts later, when their verdicts come."""

    def plan(self, extensions: Sequence[Extension]) -> None:
        """See Planner."""
        outcomes = self._overlap.outcomes(extensions)
        if not extensions:
            return
        # Of a session there may be several verdicts, and of several steps one, where this process lags behind.
        batch = len({extension.session.uid for extension in extensions})
        size = max(size for size in self._tiers if size <= batch)
        state = self._states[size]
        accepted = [
            len(credit.accepted_nodes)
            for extension in extensions
            if not (extension.copied or extension.session.wishes.has_any)
            for credit in extension.verdict.credits
        ]
        if accepted:
            self._observe(self._tiers[size], state, sum(accepted) / len(accepted))
        plan = self._plan(state.steps, outcomes)
        if plan.shape is not None and plan.shape != self.current.shape:
            self.decisions["reshaped"] += 1
            self._apply(plan.shape)
        if plan.speculate != self.current.speculate:
            self.decisions["resumed" if plan.speculate else "paused"] += 1
        note_overlap(self.decisions, self.current, plan)
        self.current = plan

    def drafted(self, made: Sequence[Grown], sessions: int, ms: float) -> None:
        """Time plays no part in this rule."""

    def _plan(self, steps: int, outcomes: int) -> Plan:
        if steps == 0:
            return Plan(self.current.shape, speculate=False)
        return Plan(TreeShape(steps, 1, steps + 1), outcomes=outcomes)

    @staticmethod
    def _observe(tier: Tier, state: _State, accepted: float) -> None:
        state.batches += 1
        state.ema += (1.0 if state.batches == 1 else tier.ema_alpha) * (accepted - state.ema)
        if state.batches < tier.warmup_batches or (state.batches - tier.warmup_batches) % tier.update_interval:
            return
        up, down = (_pick(tier, state.ema - slack) for slack in (tier.up_hysteresis, tier.down_hysteresis))
        if up > state.steps:
            state.steps = up
        elif down < state.steps:
            state.steps = down


def _pick(tier: Tier, ema: float) -> int:
    wanted = round(ema) + 1
    return next((steps for steps in tier.candidate_steps if steps >= wanted), tier.candidate_steps[-1])
