"""Copies of a session's own text: where it repeats, for as long as they come true, and before the model's trees."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.copying import CATCH_UP, Copier
from draft_service.drafters.base import AheadRequest, Draft, DraftRequest, GivenUp
from draft_service.drafters.corpus import Corpus
from draft_service.drafters.ngram import NgramDrafter
from draft_service.drafters.trie import MatchRules, NgramTrie
from draft_service.drafting import Drafting
from draft_service.evidence import Evidence
from draft_service.overlap import FixedOverlap
from draft_service.planning import FixedPlanner, Plan
from draft_service.repetition import MIN_MATCH, CopyRates, Text
from draft_service.session import Copied, Extension, Grown, Sent, Session
from draft_service.sessions import InVerification
from outrider.tree import TokenTree
from outrider.v1 import common_pb2
from outrider.v1 import verify_pb2 as pb
from outrider.wire import pack_ids, unpack_ids
from tests.draft_service.sending import sent
from tests.draft_service.test_sessions import NO_IDS, opened, table, verdict

LINE = [11, 12, 13, 14, 15, 16]
TOKENS = st.lists(st.integers(0, 3), min_size=5, max_size=120)


def session_of(tokens: Sequence[int], *, remaining: int = 100, **more: Any) -> Session:
    message = opened(tokens=list(tokens), prompt_len=more.pop("prompt_len", 1), remaining_tokens=remaining,
                     remaining_context=remaining, **more)  # fmt: skip
    return Session.from_opened(message, uid=1, vocabulary="", vocab_size=100, context_length=4096)


def chain(draft: Draft | None) -> list[int]:
    if draft is None:
        return []
    assert draft.parents.tolist() == list(range(-1, len(draft) - 1))
    assert (np.diff(draft.probabilities) <= 0).all()
    return draft.tokens.tolist()


def longest_match(tokens: Sequence[int]) -> int:
    """Length of the longest match of the newest tokens with any earlier place."""
    return max(
        sum(1 for i in range(end) if list(tokens[end - i - 1 : end]) == list(tokens[len(tokens) - i - 1 :]))
        for end in range(len(tokens))
    )


def test_what_followed_before_is_proposed() -> None:
    draft = Copier().draft(session_of([*LINE, 1, 2, *LINE[:3]]), 32)
    assert chain(draft)[:5] == [*LINE[3:], 1, 2]
    assert draft is not None
    assert draft.memo == Copied(3)


def test_the_newest_place_counts() -> None:
    tokens = [*LINE[:3], 7, 7, *LINE[:3], 8, 8, *LINE[:3]]
    assert chain(Copier().draft(session_of(tokens), 32))[:2] == [8, 8]


def test_a_copy_goes_on_where_it_came_from() -> None:
    """Though its newest tokens stood elsewhere since, and after a token that was edited."""
    source = [*LINE, 30, *LINE[:3], 31, 32, 33, 34, 35, 36]
    told, copier = session_of([*source, 90, *LINE[:3], 91, 92]), Copier()
    told.commit([*LINE, 30])
    assert chain(copier.draft(told, 32))[:4] == [*LINE[:3], 31]
    told.commit(LINE[:3])
    assert chain(copier.draft(told, 32))[:3] == [31, 32, 33]
    told.commit([31, 77, 33])
    copier.draft(told, 32)
    told.commit([34, 35])
    assert chain(copier.draft(told, 32))[:1] == [36]


def test_a_loop_is_gone_on_with() -> None:
    draft = Copier().draft(session_of([5, 9, 5, 9, 5, 9, 5, 9]), 32)
    assert chain(draft) == ([5, 9] * 8)[: len(chain(draft))]
    assert len(chain(draft)) > 2


@given(TOKENS)
def test_every_copy_is_of_the_text(tokens: list[int]) -> None:
    """What is copied follows the newest MIN_MATCH tokens or more, where they stood before."""
    draft = Copier().draft(session_of(tokens), 32)
    if draft is None:
        return
    assert isinstance(draft.memo, Copied)
    (match_len,), whole = draft.memo, [*tokens, *draft.tokens.tolist()]
    assert MIN_MATCH <= match_len <= longest_match(tokens)
    assert any(
        tokens[-match_len:] == tokens[-match_len - distance : -distance]
        and all(whole[i] == whole[i - distance] for i in range(len(tokens), len(whole)))
        for distance in range(1, len(tokens) - match_len + 1)
    )


@given(TOKENS, st.lists(st.integers(1, 9), max_size=20))
def test_told_bit_by_bit_it_finds_no_less(tokens: list[int], steps: list[int]) -> None:
    """However the text came; of a text that came whole only the newest place is known."""
    text, told, whole = np.array(tokens, np.int32), *(Text(CopyRates(), NO_IDS, 1) for _ in range(2))
    for end in accumulate([2, *steps, len(tokens)]):
        told.look(text[:end])
    whole.look(text)
    assert told.match_len >= whole.match_len


def test_long_texts_are_searched_whole() -> None:
    text = [*LINE, 1, *np.random.default_rng(1).integers(20, 99, 4000).tolist(), *LINE]
    assert chain(Copier().draft(session_of(text), 32))[:1] == [1]


@pytest.mark.parametrize("name", ["num_draft_tokens", "num_steps", "topk"])
def test_a_request_that_fixes_its_tree_gets_no_copy(name: str) -> None:
    wish = common_pb2.SpeculativeParams(enabled=True)
    setattr(wish, name, 4)
    assert Copier().draft(session_of(LINE * 4, speculative=wish), 32) is None


def test_a_prediction_is_drawn_from() -> None:
    told = session_of([1, 2, 3], prediction_tokens=pack_ids([*LINE, 30, 31]))
    assert Copier().draft(told, 32) is None
    copier = Copier()
    told.commit(LINE[:4])
    draft = copier.draft(told, 32)
    assert draft is not None
    assert chain(draft)[:4] == [15, 16, 30, 31]
    assert draft.from_prediction.tolist()[:5] == [True] * 4 + [False] * (len(draft) > 4)
    quoted = session_of([*LINE, 30, 31], prompt_len=8, prediction_tokens=pack_ids([*LINE, 30, 31]))
    quoted.commit(LINE[:4])
    both = Copier().draft(quoted, 32)  # as clients send it: the text to be edited is in the prompt too
    assert both is not None
    assert both.from_prediction[:4].all()
    told.commit([15, 16, 30, 40, 41, 42, 40, 41, 42])
    draft = copier.draft(told, 32)
    assert chain(draft)[:2] == [40, 41]
    assert draft is not None
    assert not draft.from_prediction.any()


def test_limits_are_kept() -> None:
    assert len(chain(Copier().draft(session_of(LINE * 8), 4))) == 4
    assert len(chain(Copier(5).draft(session_of(LINE * 8), 32))) == 5
    assert len(chain(Copier().draft(session_of(LINE * 8, remaining=4), 32))) == 3  # a step commits one more
    assert Copier().draft(session_of(LINE * 8, remaining=1), 32) is None
    assert Copier().draft(session_of(LINE * 8, prompt_len=48), 32) is None  # nothing is verified below a prompt


def test_text_that_only_seems_to_repeat_is_left_to_the_model() -> None:
    told, copier = session_of([*LINE, 1], remaining=4000), Copier()
    rounds = []
    for i in range(40):
        told.commit([*LINE[:3], 50 + i])
        told.commit(LINE[:3])
        rounds.append(copier.draft(told, 32) is not None)
        told.commit([20 + i])
        copier.draft(told, 32)
    assert rounds[0]
    assert not any(rounds[-10:])


def test_a_better_model_is_asked_sooner() -> None:
    copier, told = Copier(), session_of([*LINE, 1, 2, *LINE[:3]])
    assert copier.draft(told, 32) is not None
    for _ in range(20):
        _accept_all(copier, told, 7)
    assert copier.draft(told, 32) is None


def _accept_all(copier: Copier, told: Session, count: int) -> None:
    """A chain of the model's is proposed, and accepted."""
    credit = pb.Credit(proposal_id=1, root_node=-1, nodes_verified=count, accepted_nodes=range(count))
    tree = TokenTree.chain(np.arange(count, dtype=np.int32))
    _propose(told, Draft(tree.tokens, tree.parents, np.ones(count)))
    copier.drafts(table(), [], [_extension(told, len(told.tokens), credit)], is_asked=True)


def _paused() -> FixedPlanner:
    planner = FixedPlanner()
    planner.current = Plan(speculate=False)
    return planner


def _propose(session: Session, draft: Draft) -> None:
    session.last_proposal_id = 0
    table().propose(pb.Proposal(), session, draft, b"", 0, keeps_memo=True)


def _extension(session: Session, base_len: int, *credits: pb.Credit) -> Extension:
    return Extension(session, base_len, verdict(base_len=base_len, credits=credits))


def test_rates_are_learnt_by_length() -> None:
    rates = CopyRates()
    before = rates.chances(3, 4, 0.0)
    for _ in range(50):
        rates.observe(3, 0, missed=True)
        rates.observe(8, 4, missed=False)
    after = rates.chances(3, 4, 0.0)
    assert after[0] < 0.3 < before[0]
    assert rates.chances(3, 4, 0.3) == []
    assert rates.chances(8, 4, 0.9) == rates.chances(8, 4, 0.0)
    own = CopyRates(rates)
    assert own.chances(3, 1, 0.0) == pytest.approx(rates.chances(3, 1, 0.0))
    for _ in range(50):
        own.observe(3, 1, missed=False)
    assert own.chances(3, 1, 0.0)[0] > rates.chances(3, 1, 0.0)[0]


# ---- below a step that runs


def test_ahead_of_a_copy_the_next_one_goes_on() -> None:
    copier, told = Copier(), session_of(LINE * 5)
    draft = copier.draft(told, 4)
    assert draft is not None
    item = InVerification.whole(told, draft.tree, draft.probabilities, draft.memo)
    ahead = copier.draft_ahead(item, 16, 32)
    assert ahead is not None
    assert ahead.assumed.tolist() == LINE[:5]  # what is verified, and the bonus
    assert chain(ahead)[:3] == [16, 11, 12]
    assert copier.draft_ahead(item, 4, 32) is None  # as many may not be assumed
    unlikely = InVerification.whole(session_of([1, 2, 3, 4]), draft.tree, draft.probabilities, None)
    assert Copier().draft_ahead(unlikely, 16, 32) is None


def test_ahead_of_a_models_tree_it_goes_along_its_nodes() -> None:
    told = session_of(LINE * 5)
    tree = TokenTree(np.array([50, 11, 12, 51], np.int32), np.array([-1, -1, 1, 1], np.int32))
    ahead = Copier().draft_ahead(InVerification.whole(told, tree, np.ones(4), None), 16, 32)
    assert ahead is not None
    assert ahead.assumed.tolist() == [11, 12, 13]
    assert chain(ahead)[:2] == [14, 15]


# ---- in a drafter's rounds


class Model(NgramDrafter):
    """Stands for a draft model: notes what it is asked for, and drafts the token 99."""

    asked: list[tuple[int, int]]

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.asked += [(len(request.session.tokens), request.num_nodes) for request in requests]
        one = Draft(np.array([99], np.int32), np.array([-1], np.int32), np.ones(1), grown=Grown(1, 1))
        return [one if request.num_nodes else Draft() for request in requests]

    def draft_ahead(self, requests: Sequence[AheadRequest]) -> list[list[Draft]]:
        self.asked += [(-len(request.verifying.session.tokens), request.num_nodes) for request in requests]
        return [[] for _ in requests]


class Rounds:
    """A model's drafting, told of one session's verdicts."""

    def __init__(self, tokens: list[int], planner: FixedPlanner | None = None, **limits: int) -> None:
        self.model = Model(Corpus(NgramTrie(1000), max_pending_tokens=1000), MatchRules())
        self.model.asked = []
        self.drafting = Drafting(self.model, planner, copier=Copier())
        self.table = table(**limits)
        self.first = opened(tokens=tokens, remaining_tokens=2000, remaining_context=2000)
        self.length = len(tokens)

    async def verdict(self, tokens: list[int], **more: Any) -> list[pb.Proposal]:
        round = pb.Round(verdicts=[verdict(base_len=self.length, tokens=tokens, **more)])
        if self.table.get(1, 1) is None:
            round.opened.append(self.first)
        self.length += len(tokens)
        frames = await sent(self.drafting, self.table, round)
        return [proposal for frame in frames for proposal in frame.proposals.proposals]


@pytest.mark.asyncio
async def test_copies_go_out_in_place_of_trees() -> None:
    rounds = Rounds(LINE * 2)
    (found,) = await rounds.verdict(LINE[:4])
    assert unpack_ids(found.tokens, field="tokens").tolist()[:4] == [15, 16, 11, 12]
    assert len(found.scores) == len(found.tokens) // 4
    assert rounds.model.asked == []
    (found,) = await rounds.verdict([70, 71])
    assert unpack_ids(found.tokens, field="tokens").tolist() == [99]
    assert rounds.drafting.copier is not None
    assert (rounds.drafting.copier.num_copies, rounds.drafting.copier.num_accepted) == (1, 0)
    rounds.model.close_down()


@pytest.mark.asyncio
async def test_the_model_reads_now_and_then_what_was_copied() -> None:
    rounds = Rounds(LINE * 2)
    for _ in range(3 * CATCH_UP // len(LINE)):
        assert len(await rounds.verdict(LINE)) == 1
    lengths = [length for length, num_nodes in rounds.model.asked if num_nodes == 0]
    assert rounds.model.asked == [(length, 0) for length in lengths]
    assert 2 <= len(lengths) <= 3
    assert np.diff(lengths).min() >= CATCH_UP
    rounds.model.close_down()


@pytest.mark.asyncio
async def test_copies_are_made_while_the_model_does_not_pay() -> None:
    rounds = Rounds(LINE * 2, _paused())
    (copied,) = await rounds.verdict(LINE[:4])
    assert len(copied.tokens) > 4
    (declined,) = await rounds.verdict([70, 71])
    assert declined.tokens == b""
    assert rounds.model.asked == []
    rounds.model.close_down()


@pytest.mark.asyncio
async def test_a_pause_leaves_all_copies_in() -> None:
    """Though the model had more accepted before it was paused: it is not asked."""
    rounds = Rounds(LINE * 2, _paused())
    copier, told = rounds.drafting.copier, session_of([*LINE, 1, 2, *LINE[:3]])
    assert copier is not None
    copier.draft(told, 32)  # makes it known
    for _ in range(300):
        _accept_all(copier, told, 20)
    copier.forget([told])
    (copied,) = await rounds.verdict(LINE[:4])
    assert len(copied.tokens) > 4
    rounds.model.close_down()


@pytest.mark.asyncio
async def test_rows_that_come_late_bring_no_second_copy() -> None:
    rounds = Rounds(LINE * 2)
    assert len(await rounds.verdict(LINE[:4])) == 1
    late = common_pb2.FeatureRows(first_pos=12, count=4)
    frame = pb.Round(features=[pb.SessionFeatures(session=1, generation=1, rows=late)])
    assert await sent(rounds.drafting, rounds.table, frame) == []
    assert rounds.model.asked == []
    rounds.model.close_down()


@pytest.mark.asyncio
async def test_a_session_that_the_model_gave_up_is_forgotten() -> None:
    rounds = Rounds(LINE * 2)
    assert rounds.drafting.copier is not None
    await rounds.verdict(LINE[:4])
    session = rounds.table.get(1, 1)
    assert session is not None
    given = GivenUp(session, pb.RELEASE_REASON_CAPACITY, "no room")
    rounds.model.take_given_up = lambda: [given]
    await rounds.verdict([70, 71])
    assert rounds.table.get(1, 1) is None
    assert not rounds.drafting.copier._known
    rounds.model.close_down()


@pytest.mark.asyncio
async def test_the_planner_does_not_time_what_copies_left() -> None:
    rounds = Rounds(LINE * 2)
    timed: list[int] = []
    rounds.drafting.planner.drafted = lambda made, sessions, ms: timed.append(sessions)
    (copied,) = await rounds.verdict(LINE[:4])
    credit = pb.Credit(proposal_id=copied.proposal_id, root_node=-1, nodes_verified=8)
    await rounds.verdict([70, 71], credits=[credit])
    assert timed == []
    await rounds.verdict([72, 73])
    assert timed == [1]
    rounds.model.close_down()


@pytest.mark.asyncio
async def test_an_early_copy_follows_one_that_verify_waits_for() -> None:
    rounds = Rounds(LINE * 4, FixedPlanner(FixedOverlap(on=True)), max_proposal_nodes=6)
    waiting = pb.Next(kind=pb.NEXT_KIND_WAITING, base_len=28)
    fresh, early = await rounds.verdict(LINE[:4], next=waiting)
    tokens = unpack_ids(fresh.tokens, field="tokens").tolist()
    assumed = unpack_ids(early.assumed, field="assumed").tolist() if early.assumed else []
    assert assumed[:-1] == tokens
    assert rounds.model.asked == []  # a head would have to run all nodes of the copy
    rounds.model.close_down()


@pytest.mark.asyncio
async def test_the_model_reads_too_where_copies_follow_copies() -> None:
    rounds = Rounds(LINE * 4, FixedPlanner(FixedOverlap(on=True)), max_proposal_nodes=6)
    waiting = pb.Next(kind=pb.NEXT_KIND_WAITING, base_len=28)
    *_, early = await rounds.verdict(LINE[:4], next=waiting)
    place = 4
    for _ in range(2 * CATCH_UP // 6):
        count = len(early.assumed) // 4
        tokens = [LINE[(place + i) % 6] for i in range(count)]
        place += count
        following = pb.Next(
            kind=pb.NEXT_KIND_PROPOSAL, base_len=rounds.length + count, proposal_id=early.proposal_id,
            root_node=-1, nodes_kept=len(early.tokens) // 4,
        )  # fmt: skip
        (early,) = await rounds.verdict(tokens, next=following)
    assert len(rounds.model.asked) >= 2
    assert all(num_nodes == 0 for _, num_nodes in rounds.model.asked)
    rounds.model.close_down()


@pytest.mark.asyncio
async def test_what_became_of_copies_says_nothing_of_the_model() -> None:
    rounds, evidence = Rounds(LINE * 2), Evidence()
    (found,) = await rounds.verdict(LINE[:4])
    credit = pb.Credit(proposal_id=found.proposal_id, root_node=-1, nodes_verified=8, accepted_nodes=range(8))
    changes = rounds.table.apply([pb.Round(verdicts=[verdict(base_len=16, tokens=[*LINE, 11], credits=[credit])])])
    evidence.observe(changes.extended)
    assert evidence.trees(1).accepted.num_seen == 0
    assert evidence.committed == 2.0
    rounds.model.close_down()


@pytest.mark.asyncio
async def test_a_closed_session_is_forgotten() -> None:
    rounds = Rounds(LINE * 2)
    await rounds.verdict(LINE[:4])
    closed = pb.Round(closed=[pb.Closed(session=1, generation=1)])
    assert await sent(rounds.drafting, rounds.table, closed) == []
    assert rounds.drafting.copier is not None
    assert not rounds.drafting.copier._known
    rounds.model.close_down()


@pytest.mark.asyncio
async def test_sessions_are_forgotten_though_the_stream_breaks_while_a_copy_is_sent() -> None:
    rounds = Rounds(LINE * 2)
    closed: list[int] = []
    rounds.model.close = lambda sessions: closed.extend(session.session_id for session in sessions)
    await rounds.verdict([70, 71])
    other = pb.Round(opened=[opened(session=2, tokens=[1, 2, 3], prompt_len=3)])
    await sent(rounds.drafting, rounds.table, other)
    verdicts = [verdict(base_len=rounds.length, tokens=LINE[:4])]
    ending = pb.Closed(session=2, generation=1, reason=pb.CLOSE_REASON_FINISHED)

    async def breaks(frame: pb.SpeculateRequest) -> None:
        assert len(frame.proposals.proposals) == 1
        assert closed == []
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await rounds.drafting.serve(rounds.table, [pb.Round(verdicts=verdicts, closed=[ending])], breaks)
    assert closed == [2]
    rounds.model.close_down()


def test_each_of_joined_verdicts_credits_is_held_for_what_it_was() -> None:
    sessions, copier = table(), Copier()
    sessions.apply([pb.Round(opened=[opened(tokens=LINE, remaining_tokens=100, remaining_context=100)])])
    session = sessions.get(1, 1)
    assert session is not None
    copier.draft(session, 4)  # makes it known
    nodes = np.array([4, 5], np.int32), np.array([-1, 0], np.int32), bytes(2)
    session.sent[1] = Sent(1, len(LINE), NO_IDS, *nodes, Copied(3))
    session.sent[2] = Sent(2, len(LINE) + 1, NO_IDS, *nodes)
    joined = verdict(base_len=len(LINE), tokens=[9, 4, 5, 8], steps=2)
    joined.credits.add(proposal_id=1, root_node=-1, nodes_verified=2)
    joined.credits.add(proposal_id=2, root_node=-1, nodes_verified=2, accepted_nodes=[0, 1])
    copier.drafts(sessions, [], sessions.apply([pb.Round(verdicts=[joined])]).extended, is_asked=True)
    assert copier.num_accepted == 0
