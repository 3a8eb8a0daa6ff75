"""The n-gram drafter: what a session may draw from, and how requests shape its trees."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

from draft_service.drafters import trie_match, trie_nodes
from draft_service.drafters.base import AheadRequest, Draft, DraftRequest, TextRequest
from draft_service.drafters.corpora import MAX_PER_SCOPE, CorpusSize
from draft_service.drafters.ngram import NgramDrafter
from draft_service.session import Extension, Session, Wishes
from draft_service.sessions import InVerification
from outrider.args import DraftArgs
from outrider.errors import NotFound, ResourceExhausted
from outrider.tree import ROOT, TokenTree
from outrider.v1 import verify_pb2

uids = count(1)
LONG = list(range(100, 130))


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


@pytest.fixture
def make() -> Iterator[Any]:
    drafters: list[NgramDrafter] = []

    def make(**flags: Any) -> NgramDrafter:
        small: dict[str, Any] = {"speculative_ngram_capacity": 100_000}
        drafters.append(NgramDrafter.from_args(DraftArgs(**(small | flags))))
        return drafters[-1]

    yield make
    for drafter in drafters:
        drafter.close_down()


def session(tokens: list[int], **more: Any) -> Session:
    fields: dict[str, Any] = {
        "uid": next(uids), "session_id": 1, "generation": 1, "prompt_len": len(tokens), "remaining": 1000,
        "vocabulary": "v", "vocab_size": 1000, "wishes": Wishes(), "corpus_scope": "", "prediction": ids(),
        "tokens": ids(*tokens),
    }  # fmt: skip
    return Session(**(fields | more))


def opened(drafter: NgramDrafter, tokens: list[int], **more: Any) -> Session:
    found = session(tokens, **more)
    drafter.open([found])
    drafter.corpus.flush()
    return found


def load(drafter: NgramDrafter, scope: str, corpus_id: str, *tokens: int) -> None:
    drafter.corpora.load(scope, corpus_id, ids(*tokens)).result()


def commit(drafter: NgramDrafter, target: Session, tokens: list[int]) -> None:
    base_len = len(target.tokens)
    target.commit(ids(*tokens))
    drafter.extend([Extension(target, base_len, verify_pb2.Verdict())])
    drafter.corpus.flush()


def draft(drafter: NgramDrafter, target: Session, num_nodes: int = 11) -> Draft:
    (found,) = drafter.draft([DraftRequest(target, num_nodes)])
    return found


def test_a_prompt_is_drafted_from_wherever_it_repeats(make: Any) -> None:
    drafter = make()
    target = opened(drafter, [*LONG, 7, 100, 101])
    assert draft(drafter, target).tokens.tolist() == list(range(102, 113))
    assert not draft(drafter, target).from_prediction.any()
    fresh = opened(drafter, [900, 901])
    assert len(draft(drafter, fresh)) == 0


def test_what_is_committed_is_drafted_from_too(make: Any) -> None:
    drafter = make()
    target = opened(drafter, [1, 2])
    for tokens in ([50], [51, 52, 53], [54], [9, 50]):
        commit(drafter, target, tokens)
    assert draft(drafter, target).tokens.tolist() == [51, 52, 53, 54, 9, 50]


def test_sessions_share_one_trie_unless_scopes_keep_them_apart(make: Any) -> None:
    drafter = make()
    opened(drafter, LONG)
    opened(drafter, [100, 300], corpus_scope="a")
    assert draft(drafter, opened(drafter, [7, 100])).tokens.tolist()[0] == 101
    assert draft(drafter, opened(drafter, [7, 100], corpus_scope="a")).tokens.tolist() == [300]
    assert len(draft(drafter, opened(drafter, [7, 100], corpus_scope="b"))) == 0
    assert len(draft(drafter, opened(drafter, [7, 100], vocabulary="another"))) == 0


def test_session_scope_keeps_every_session_apart_and_frees_its_nodes(make: Any) -> None:
    drafter = make(speculative_ngram_scope="session")
    opened(drafter, LONG)
    other = opened(drafter, [7, 100])
    assert len(draft(drafter, other)) == 0
    commit(drafter, other, [8, 7, 100])
    assert draft(drafter, other).tokens.tolist() == [8, 7, 100]
    nodes = drafter.corpus.num_nodes
    drafter.close([other])
    drafter.corpus.flush()
    assert drafter.corpus.num_nodes < nodes
    assert len(draft(drafter, other)) == 0


def test_a_prediction_is_drafted_first_is_marked_and_goes_with_its_session(make: Any) -> None:
    drafter = make()
    opened(drafter, [1, 2, 30])
    other = opened(drafter, [9, 1, 2])
    before = drafter.corpus.num_nodes
    target = opened(drafter, [1, 2], prediction=ids(1, 2, 3, 4))
    found = draft(drafter, target)
    assert found.tokens.tolist() == [3, 30, 4]
    assert found.from_prediction.tolist() == [True, False, True]
    assert draft(drafter, other).tokens.tolist() == [30]
    drafter.close([target])
    drafter.corpus.flush()
    assert drafter.corpus.num_nodes == before


def test_a_shared_prompt_is_inserted_once(make: Any) -> None:
    drafter = make()
    opened(drafter, [*LONG, 5])
    nodes = drafter.corpus.num_nodes
    choice = opened(drafter, [*LONG, 5], shares_prefix=True)
    assert drafter.corpus.num_nodes == nodes
    commit(drafter, choice, [6])
    assert drafter.corpus.num_nodes > nodes
    alone = make(speculative_ngram_scope="session")
    assert draft(alone, opened(alone, [1, 2, 3, 1], shares_prefix=True)).tokens.tolist() == [2, 3, 1]


def test_wishes_and_what_is_left_shape_the_tree(make: Any) -> None:
    drafter = make()
    opened(drafter, [1, 20, 21, 1, 30, 31, 1, 40, 41])
    assert sorted(draft(drafter, session([1])).tokens.tolist()[:3]) == [20, 30, 40]
    narrow = draft(drafter, session([1], wishes=Wishes(topk=1)))
    assert narrow.tokens.tolist() == [40, 41]
    assert draft(drafter, session([1], wishes=Wishes(num_steps=1))).tree.depths.max() == 1
    assert draft(drafter, session([1], remaining=3)).tree.depths.max() == 2
    assert len(draft(drafter, session([1], remaining=1))) == 0
    assert len(draft(drafter, session([1]), num_nodes=2)) == 2
    assert draft(drafter, session([1], vocab_size=30)).tokens.tolist() == [20, 21, 1]


@pytest.mark.parametrize(("match_type", "branches"), [("BFS", [1, 1, 2, 3]), ("PROB", [1, 2, 3, 4])])
def test_topk_is_the_most_that_a_match_is_followed_by(make: Any, match_type: str, branches: list[int]) -> None:
    drafter = make(speculative_ngram_match_type=match_type)
    opened(drafter, [1, 20, 21, 1, 30, 31, 1, 40, 41, 1, 50, 51])
    trees = [draft(drafter, session([1], wishes=Wishes(topk=topk))).tree for topk in (1, 2, 3, 4)]
    assert [len(tree.children(ROOT)) for tree in trees] == branches


def test_matches_of_several_lengths_add_branches(make: Any) -> None:
    drafter = make()
    opened(drafter, [1, 2, 100])
    opened(drafter, [9, 2, 200])
    found = draft(drafter, session([1, 2], wishes=Wishes(topk=1)))
    assert (found.tokens.tolist(), found.tree.parents.tolist()) == ([100, 200], [ROOT, ROOT])


def test_prob_takes_the_most_frequent(make: Any) -> None:
    drafter = make(speculative_ngram_match_type="PROB")
    for tail in (20, 20, 30):
        opened(drafter, [1, tail])
    assert draft(drafter, session([1]), num_nodes=1).tokens.tolist() == [20]
    recent = make(speculative_ngram_match_type="BFS")
    for tail in (20, 20, 30):
        opened(recent, [1, tail])
    assert draft(recent, session([1]), num_nodes=1).tokens.tolist() == [30]


def test_drafting_ahead_assumes_the_whole_tree_and_a_bonus(make: Any) -> None:
    drafter = make()
    opened(drafter, LONG)
    target = session([7, 100], wishes=Wishes(num_draft_tokens=4))
    tree = TokenTree.chain(ids(101, 102))
    verifying = InVerification(target, tree, np.array([0.9, 0.9]))
    ((first, *rest),) = drafter.draft_ahead([AheadRequest(verifying, 3, max_assumed=8, max_outcomes=2)])
    assert rest == []  # where the tree offers the only known continuation, no bonus is left to guess
    assert first.assumed.tolist() == [101, 102, 103]
    assert first.tokens.tolist() == [104, 105, 106]
    assert drafter.draft_ahead([AheadRequest(verifying, 3, max_assumed=2, max_outcomes=2)]) == [[]]


def test_drafting_ahead_guesses_a_token_that_the_tree_does_not_offer(make: Any) -> None:
    drafter = make()
    opened(drafter, [1, 20, 21, 22])
    opened(drafter, [1, 30, 31, 32])
    verifying = InVerification(session([1]), TokenTree.chain(ids(30)), np.array([0.2]))
    ((likely, other),) = drafter.draft_ahead([AheadRequest(verifying, 5, max_assumed=8, max_outcomes=2)])
    assert (likely.assumed.tolist(), likely.tokens.tolist()) == ([20], [21, 22])
    assert (other.assumed.tolist(), other.tokens.tolist()) == ([30, 31], [32])
    ((one,),) = drafter.draft_ahead([AheadRequest(verifying, 5, max_assumed=8, max_outcomes=1)])
    assert one.assumed.tolist() == [20]
    short = InVerification(session([1], remaining=2), verifying.tree, verifying.probabilities)
    assert drafter.draft_ahead([AheadRequest(short, 5, max_assumed=8, max_outcomes=2)]) == [[]]


@pytest.mark.asyncio
async def test_a_text_is_continued_from_itself_prediction_and_corpora_without_a_trace(make: Any) -> None:
    drafter = make()
    load(drafter, "", "one", 8, 80, 81)
    load(drafter, "a", "one", 8, 90)
    before = drafter.corpus.num_nodes
    request = TextRequest(ids(8, 70, 8), prediction=ids(8, 60))
    found = await drafter.propose(request)
    assert found.tokens.tolist() == [60, 70, 80, 8, 81]
    assert found.from_prediction.tolist() == [True, False, False, False, False]
    scoped = await drafter.propose(TextRequest(ids(8), corpus_scope="a"))
    assert scoped.tokens.tolist() == [90, 80, 81]
    limited = await drafter.propose(TextRequest(ids(8), wishes=Wishes(num_steps=1, num_draft_tokens=2)))
    assert limited.tokens.tolist() == [80]
    drafter.corpus.flush()
    assert drafter.corpus.num_nodes == before


@pytest.mark.asyncio
async def test_a_long_text_takes_no_room_from_sessions(make: Any) -> None:
    drafter = make(speculative_ngram_capacity=20_000)
    text, other = np.random.default_rng(0).integers(0, 1_000, (2, 6_000)).astype(np.int32)
    opened(drafter, text[:500].tolist())
    drafter.corpora.load("", "one", other[:100]).result()
    before, asking = drafter.corpus.num_nodes, session(text[200:208].tolist())
    drafted = draft(drafter, asking).tokens.tolist()
    own = TextRequest(np.concatenate([other, other[5_000:5_008]]), vocabulary="v")
    assert (await drafter.propose(own)).tokens.tolist()[0] == other[5_008]
    await drafter.propose(TextRequest(text[200:208], prediction=other, vocabulary="v"))
    assert drafter.corpus.num_nodes == before
    assert drafted
    assert draft(drafter, asking).tokens.tolist() == drafted


@pytest.mark.asyncio
async def test_a_texts_own_matches_and_others_are_read_as_if_they_were_in_one_trie(make: Any) -> None:
    texts = np.random.default_rng(1).integers(0, 6, (60, 3, 40)).astype(np.int32)
    for name, (own, shared, predicted) in enumerate(texts):
        drafter = make(speculative_ngram_match_type=("BFS", "PROB")[name % 2])
        load(drafter, "", "shared", *shared)
        scope = f"{name}"
        found = await drafter.propose(TextRequest(own, prediction=predicted, corpus_scope=scope))
        names = [("prediction",), ("own",), *drafter.corpora.names(scope)]
        drafter.corpus.insert(names[0], predicted).result()
        drafter.corpus.insert(names[1], own).result()
        expected = drafter._matched(names, own, Wishes(), 11, 18, 1000, predicted=names[0])
        for field in ("tokens", "parents", "probabilities", "from_prediction"):
            np.testing.assert_array_equal(getattr(found, field), getattr(expected, field))


def test_sessions_read_corpora_of_their_scope_and_everyones(make: Any) -> None:
    drafter = make(speculative_ngram_scope="session")
    load(drafter, "", "one", 8, 80)
    load(drafter, "a", "one", 8, 90)
    assert draft(drafter, opened(drafter, [8], corpus_scope="a")).tokens.tolist() == [90, 80]
    assert draft(drafter, opened(drafter, [8])).tokens.tolist() == [80]


def test_a_corpus_that_is_taken_out_is_drawn_from_no_more(make: Any) -> None:
    drafter = make(speculative_ngram_external_corpus_max_tokens=9)
    load(drafter, "", "one", 8, 80)
    load(drafter, "", "two", 8, 81)
    load(drafter, "a", "one", 8, 90)
    load(drafter, "", "one", 7, 70)
    assert drafter.corpora.sizes() == [CorpusSize("", "one", 4), CorpusSize("", "two", 2), CorpusSize("a", "one", 2)]
    with pytest.raises(ResourceExhausted, match="8 corpus tokens are held and 2 more are to come; at most 9"):
        load(drafter, "b", "one", 1, 2)
    size, gone = drafter.corpora.unload("", "one")
    gone.result()
    assert size == 4
    assert draft(drafter, opened(drafter, [8], corpus_scope="a")).tokens.tolist() == [90, 81]
    assert draft(drafter, opened(drafter, [7])).tokens.tolist() == []
    with pytest.raises(NotFound, match="no corpus 'one' in the scope of everyone"):
        drafter.corpora.unload("", "one")
    with pytest.raises(NotFound, match="no corpus 'two' in scope 'a'"):
        drafter.corpora.unload("a", "two")
    load(drafter, "b", "one", 1, 2)
    for scope, corpus_id in (("", "two"), ("a", "one"), ("b", "one")):
        drafter.corpora.unload(scope, corpus_id)[1].result()
    assert drafter.corpora.sizes() == []


def test_what_is_taken_out_at_once_leaves_nothing(make: Any) -> None:
    drafter = make()
    before = drafter.corpus.num_nodes
    loaded = drafter.corpora.load("", "long", np.arange(2_500, dtype=np.int32))
    drafter.corpora.unload("", "long")[1].result()
    assert loaded.done()
    assert drafter.corpus.num_nodes == before


def test_a_corpus_proposes_the_same_after_any_traffic_and_no_more_than_fits_is_taken(make: Any) -> None:
    drafter = make(speculative_ngram_capacity=20_000)
    text, traffic = np.random.default_rng(0).integers(0, 1_000, (2, 3_000)).astype(np.int32)
    drafter.corpora.load("", "one", text[:500]).result()
    with pytest.raises(ResourceExhausted, match=r"100 tokens may take 1648 nodes .* 10000 that are for them"):
        load(drafter, "", "two", *text[500:600])
    before = [draft(drafter, session(text[at : at + 8].tolist())).tokens.tolist() for at in range(0, 480, 40)]
    assert all(before)
    for piece in np.array_split(traffic, 10):
        opened(drafter, piece.tolist(), vocabulary="other")
    assert drafter.corpus.num_nodes == drafter.corpus.capacity
    after = [draft(drafter, session(text[at : at + 8].tolist())).tokens.tolist() for at in range(0, 480, 40)]
    assert after == before
    assert drafter.corpora.sizes() == [CorpusSize("", "one", 500)]


def test_corpora_are_counted(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make()
    for number in range(MAX_PER_SCOPE):
        load(drafter, "a", str(number), 1, 2)
    with pytest.raises(ResourceExhausted, match="'more' is new, and its scope has 12 corpora; at most 12"):
        load(drafter, "a", "more", 1, 2)
    load(drafter, "a", "0", 1, 3)
    monkeypatch.setattr("draft_service.drafters.corpora.MAX_CORPORA", MAX_PER_SCOPE)
    with pytest.raises(ResourceExhausted, match="there are 12 corpora; at most 12"):
        load(drafter, "", "more", 1, 2)


@pytest.mark.asyncio
async def test_a_cancelled_proposal_leaves_no_trace(make: Any) -> None:
    drafter = make()
    before = drafter.corpus.num_nodes
    call = asyncio.ensure_future(drafter.propose(TextRequest(np.arange(3_000, dtype=np.int32))))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    drafter.corpus.flush()
    assert drafter.corpus.num_nodes == before


def test_warming_up_compiles_every_form_that_is_used(make: Any) -> None:
    drafter = make()
    drafter.warm_up()
    loops: tuple[Any, ...] = (trie_match.draft_tree, trie_nodes.insert_some, trie_nodes.drop_some, trie_nodes.new_root)
    compiled = [len(loop.signatures) for loop in loops]
    frozen = np.frombuffer(np.arange(50, dtype=np.int32).tobytes(), np.int32)
    target = session([1], prediction=frozen)
    target.tokens = frozen
    drafter.open([target])
    draft(drafter, target)
    commit(drafter, target, [1, 2])
    drafter.close([target])
    drafter.corpus.flush()
    assert [len(loop.signatures) for loop in loops] == compiled
