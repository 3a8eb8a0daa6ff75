"""After acceptance: pages kept or freed, tokens committed and sent, verdicts prepared.

Whatever ends a session, it leaves by `Committer.end`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from kernels.acceptance import Accepted
from outrider.errors import Internal, OutriderError
from outrider.speculation_count import SpeculationCount
from outrider.telemetry import get_logger
from outrider.tree import ROOT
from outrider.v1 import verify_pb2
from verify_service.assignment import Assignment
from verify_service.commands import Renewed
from verify_service.drafter import Drafter
from verify_service.drafters import Drafters
from verify_service.features import FeatureSender
from verify_service.grammar import GrammarState
from verify_service.proposals import Match
from verify_service.scheduler import Scheduler
from verify_service.session import Session
from verify_service.unsent import Committed, Unsent
from verify_service.work import Work

log = get_logger(__name__)


class Committer:
    """Applies a step's outcomes."""

    def __init__(
        self, scheduler: Scheduler, drafters: Drafters, features: FeatureSender, stats: SpeculationCount,
        responses: list[tuple[Session, Unsent]],
        *, by_algorithm: defaultdict[int, SpeculationCount], renewed: Callable[[Renewed], object],
    ) -> None:  # fmt: skip
        """renewed: is told, on any thread, of what `renewed` is to be told of on the engine's."""
        self._scheduler = scheduler
        self._drafters = drafters
        self._features = features
        self._stats = stats
        self._by_algorithm = by_algorithm
        self._renewed = renewed
        self._responses = responses
        self._judged: list[Assignment] = []  # whose verdicts have no rows yet

    def commit(self, works: list[Work], outcomes: list[Accepted | None], *, step_us: int, batch_tokens: int) -> int:
        """Commits each work's outcome; None where there is none (a chunk), or where the model gave no distribution.

        Then the session goes on without drafts, or ends where it had none.

        Returns the number of tokens committed.
        """
        committed = 0
        for work, outcome in zip(works, outcomes, strict=True):
            if not work.samples:
                self._scheduler.pages.keep(work.session, work.slots, list(range(work.num_rows)))
                assignment = self._drafters.of(work.session)
                if assignment is not None and assignment is work.assignment:
                    self._features.send(assignment, min(work.session.kv_len, assignment.told_len - 1))
            elif outcome is None:
                self._scheduler.pages.keep(work.session, work.slots, [])
                if work.session.grammar is not None and work.session.grammar.is_spent:
                    self._park(work.session, work.session.grammar)
                elif work.match is not None:
                    self._go_on_without_drafts(work.session)
                else:
                    self.fail(work.session, _no_token(work.session))
            else:
                committed += self._commit_one(work, outcome, step_us, batch_tokens)
        self._features.prepare(self._judged)
        self._judged.clear()
        return committed

    def count(self) -> None:
        """Counts what clients are about to be sent; no drafter waits for that."""
        for _, said in self._responses:
            if isinstance(said, Committed) and (work := said.work) is not None:
                drafted, accepted, committed = said.num_drafted or 0, len(said.accepted), len(said.tokens)
                for stats in (said.session.stats, self._stats, self._by_algorithm[said.algorithm or 0]):
                    stats.count(drafted=drafted, accepted=accepted, committed=committed)
                if work.match is not None and work.assignment is not None:
                    self._count_used(work.match, work.assignment.drafter, len(said.accepted))
                    self._count_prediction(work, work.match, said.accepted)

    def finish_resumed(self, sessions: list[Session]) -> None:
        """Ends sessions whose resumed tokens are already a whole output."""
        for session in sessions:
            if session.resumed_len and session.finish is None:
                session.note_end()
            if session.finish is not None:
                self._responses.append((session, Committed(session, [], finished=True)))
                self._finish(session)

    def fail(self, session: Session, error: Exception) -> None:
        """Ends one session with an error; nobody else notices."""
        self._responses.append((session, error))
        self.end(session, verify_pb2.CLOSE_REASON_ERROR, reusable=False)

    def end(self, session: Session, reason: verify_pb2.CloseReason, *, reusable: bool = True) -> None:
        """Takes a session from the scheduler and from its drafter. reusable: whether its pages may be cached."""
        self._scheduler.remove(session, reusable=reusable)
        self._drafters.close(session, reason)
        self._drafters.forget(session)

    def _go_on_without_drafts(self, session: Session) -> None:
        """A draft whose row is not finite spoils those that mask it, by 0 times what is no number: the target alone is
        asked again. Or its grammar looks at no draft any more."""
        session.speculation = replace(session.speculation, enabled=False)
        self._drafters.close(session, verify_pb2.CLOSE_REASON_REASSIGNED)

    def _park(self, session: Session, grammar: GrammarState) -> None:
        """Has a session wait until its grammar, whose lexer another may have spent, was compiled once more for it."""
        matcher = grammar.renew()
        if matcher is None:  # too many wait for that
            self.fail(session, _no_token(session))
            return
        self._go_on_without_drafts(session)
        self._scheduler.park(session)
        matcher.add_done_callback(lambda done: self._renewed(Renewed(session, done)))

    def renewed(self, told: Renewed) -> None:
        """Lets a parked session go on, if it is still there."""
        session, grammar = told.session, told.session.grammar
        if grammar is None or session not in self._scheduler.parked:
            return
        try:
            grammar.take(told.matcher.result())
        except Exception as error:
            log.error("a grammar cannot be compiled once more", session=session.session_id, exc_info=error)
            self.fail(session, Internal("the request's grammar cannot go on; the server's log says why"))
        else:
            self._scheduler.unpark(session)

    def _cannot_go_on(self, session: Session, error: OutriderError) -> None:
        """After an error of its grammar: its lexer's may be another session's."""
        if session.grammar is not None and session.grammar.is_spent:
            self._park(session, session.grammar)
        else:
            self.fail(session, error)

    def _commit_one(self, work: Work, outcome: Accepted, step_us: int, batch_tokens: int) -> int:
        session, match, grammar = work.session, work.match, work.session.grammar
        drafted = len(match.tree) if match is not None else 0
        tokens = [match.tree.words[node] for node in outcome.nodes] if match is not None else []
        base_len = session.committed_len
        first_output = session.output_len == 0
        taken = session.commit([*tokens, outcome.bonus])
        error = grammar.dead_end() if grammar is not None else None
        if error is not None and not taken:
            self._scheduler.pages.keep(session, work.slots, [])
            self._cannot_go_on(session, error)
            return 0
        accepted = outcome.nodes[: len(taken)]
        chunk_rows = work.num_rows - drafted
        rows = [*range(chunk_rows), *[chunk_rows + node for node in accepted[: len(taken) - 1]]]
        self._scheduler.pages.keep(session, work.slots, rows)
        session.sampler.commit(taken)
        session.first_token_ns = session.first_token_ns or time.monotonic_ns()
        algorithm = work.assignment.drafter.algorithm if drafted and work.assignment is not None else None
        if first_output:
            self._scheduler.pages.share(session)
        said = Committed(
            session, taken, accepted, None if first_output else drafted, algorithm, session.finish is not None,
            tree=self._verified_tree(work, accepted, step_us) if session.include_trees and drafted else None,
            logprobs=work.logprobs[: len(taken)], prompt_logprobs=session.prompt_logprobs if first_output else None,
            work=None if first_output else work,
        )  # fmt: skip
        self._responses.append((session, said))
        if error is not None and session.finish is None:
            self._cannot_go_on(session, error)
            return len(taken)
        assignment = self._drafters.of(session)
        if assignment is not None and assignment is work.assignment:  # not closed to it since the step was planned
            self._judge(work, assignment, base_len, accepted, taken, step_us, batch_tokens)
        if session.finish is not None:
            self._finish(session)
        return len(taken)

    def _judge(
        self,
        work: Work,
        assignment: Assignment,
        base_len: int,
        accepted: list[int],
        taken: list[int],
        step_us: int,
        batch_tokens: int,
    ) -> None:
        """Prepares the verdict; it is told when the next step is known, or with later ones where it is silenced."""
        session, match = work.session, work.match
        if assignment.is_silenced and match is None and session.finish is None:
            assignment.note_untold(base_len, step_us, batch_tokens)
            self._advance(assignment)
            return
        if assignment.untold is None:
            verdict = assignment.verdict_of(base_len, taken, step_us, batch_tokens)
        else:
            assignment.note_untold(base_len, step_us, batch_tokens)
            verdict = assignment.take_untold()
            base_len = verdict.base_len
        if match is not None:
            credit = verdict.credits.add()
            credit.proposal_id, credit.root_node = match.proposal.proposal_id, match.root_node
            credit.nodes_verified = len(match.tree)
            credit.accepted_nodes.extend([int(match.nodes[node]) for node in accepted])
        if session.finish is None:
            if assignment.features_sent < base_len - 1:
                self._features.send(assignment, base_len - 1)
            self._judged.append(assignment)
        assignment.verdict = verdict
        self._advance(assignment)

    def _advance(self, assignment: Assignment) -> None:
        if not len(assignment.book):
            return
        session = assignment.session
        drafter = assignment.drafter
        for refused in assignment.book.advance(session.committed, explain=drafter.is_told_why):
            drafter.refuse(session.session_id, assignment.generation, refused)

    def _finish(self, session: Session) -> None:
        assignment = self._drafters.of(session)
        if assignment is not None and assignment.verdict is not None:
            assignment.tell_last(assignment.verdict)
            assignment.verdict = None
        self.end(session, verify_pb2.CLOSE_REASON_FINISHED)

    @staticmethod
    def _count_used(match: Match, drafter: Drafter, accepted: int) -> None:
        early = match.root_node != ROOT or match.proposal.is_early
        drafter.totals.count_used(accepted, early=early)
        drafter.counts["used"] += 1
        drafter.counts["drafted_tokens"] += len(match.tree)
        drafter.counts["accepted_tokens"] += accepted

    def _count_prediction(self, work: Work, match: Match, accepted: Sequence[int]) -> None:
        if not (len(match.proposal.from_prediction) and work.session.prediction):
            return
        predicted = match.proposal.from_prediction[match.nodes]
        hits = int(predicted[list(accepted)].sum())
        for stats in (work.session.stats, self._stats):
            stats.accepted_prediction_tokens += hits
            stats.rejected_prediction_tokens += int(predicted.sum()) - hits

    def _verified_tree(self, work: Work, accepted: list[int], step_us: int) -> verify_pb2.VerifiedTree:
        assert work.match is not None
        assert work.assignment is not None
        tree = work.match.tree
        hit = set(accepted)
        return verify_pb2.VerifiedTree(
            tokens=tree.tokens.tolist(),
            parents=tree.parents.tolist(),
            accepted=[node in hit for node in range(len(tree))],
            probabilities=work.probabilities,
            algorithm=work.assignment.drafter.algorithm,
            draft_us=work.match.proposal.draft_us,
            verify_us=step_us,
        )


def _no_token(session: Session) -> OutriderError:
    """Why no token could follow what is committed."""
    if session.grammar is not None and (dead_end := session.grammar.dead_end()) is not None:
        return dead_end
    is_short = session.output_len < session.params.min_tokens
    error = session.grammar.leaves_only(session.stop_ids) if session.grammar is not None and is_short else None
    return error or Internal("the model gave no finite logits for this request")
