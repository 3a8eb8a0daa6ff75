"""Texts by name, inserted by a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import numpy as np
import pytest

from draft_service.drafters.corpus import Corpus, FairLock, Name
from draft_service.drafters.trie import MatchRules, NgramTrie
from outrider.errors import ResourceExhausted

A: Name = ("text", "a")
B: Name = ("text", "b")


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


@pytest.fixture
def corpus() -> Iterator[Corpus]:
    corpus = Corpus(NgramTrie(40_000, max_kept=20_000), max_pending_tokens=50_000, max_names=4)
    yield corpus
    corpus.close()


def found(corpus: Corpus, names: list[Name], *suffix: int) -> list[int]:
    match, _ = corpus.match(names, ids(*suffix), MatchRules(), num_nodes=5, max_depth=5, vocab_size=1 << 20)
    return match.tokens.tolist()


def test_a_text_is_found_under_its_name_only(corpus: Corpus) -> None:
    corpus.insert(A, ids(1, 2, 3)).result()
    corpus.insert(B, ids(1, 2, 4)).result()
    assert found(corpus, [A], 1, 2) == [3]
    assert found(corpus, [B], 1, 2) == [4]
    assert found(corpus, [("text", "c")], 1, 2) == []
    match, names = corpus.match(
        [("text", "c"), B, A], ids(1, 2), MatchRules(), num_nodes=5, max_depth=5, vocab_size=1 << 20
    )
    assert names == [B, A]
    assert match.sources.tolist() == [1, 2]


def test_a_text_grows_in_pieces(corpus: Corpus) -> None:
    text = np.arange(1_100, dtype=np.int32)
    corpus.insert(A, text[:1_000])
    corpus.insert(A, text[1_000 - 17 :], 17)
    corpus.flush()
    assert found(corpus, [A], 998, 999) == [1000, 1001, 1002, 1003, 1004]
    assert found(corpus, [A], 1_050) == [1051, 1052, 1053, 1054, 1055]


def test_a_few_tokens_of_a_known_name_go_in_at_once_unless_the_trie_grows(corpus: Corpus) -> None:
    assert not corpus.insert(A, np.arange(1_000, dtype=np.int32)).done()
    corpus.flush()
    corpus.insert(A, np.arange(983, 1_002, dtype=np.int32), 17)
    assert found(corpus, [A], 999) == [1000, 1001]
    corpus._growing = True  # what the thread says while it copies
    later = corpus.insert(A, np.arange(985, 1_003, dtype=np.int32), 17)
    corpus._growing = False
    later.result()
    assert found(corpus, [A], 1001) == [1002]


def test_a_dropped_name_is_gone_and_its_nodes_are_free(corpus: Corpus) -> None:
    corpus.insert(A, ids(1, 2, 3)).result()
    before = corpus.num_nodes
    corpus.insert(B, np.arange(500, dtype=np.int32))
    corpus.drop(B).result()
    assert corpus.num_nodes == before
    assert found(corpus, [A], 1) == [2, 3]
    corpus.drop(("text", "never seen")).result()


def test_the_name_longest_without_insertion_goes_first(corpus: Corpus) -> None:
    names: list[Name] = [("text", str(number)) for number in range(6)]
    for name in names[:4]:
        corpus.insert(name, ids(1, 2))
    corpus.insert(names[0], ids(1, 3))
    for name in names[4:]:
        corpus.insert(name, ids(1, 2))
    corpus.flush()
    assert [bool(found(corpus, [name], 1)) for name in names] == [True, False, False, True, True, True]


def test_corpora_stay_until_they_are_unloaded(corpus: Corpus) -> None:
    names: list[Name] = [("text", str(number)) for number in range(6)]
    corpora: list[Name] = [("corpus", str(number)) for number in range(6)]
    for name in corpora:
        corpus.load(name, ids(1, 2)).result()
    for name in names:
        corpus.insert(name, ids(1, 2)).result()
    assert all(found(corpus, [name], 1) == [2] for name in corpora)
    assert [bool(found(corpus, [name], 1)) for name in names] == [False, False, True, True, True, True]
    for name in corpora:
        corpus.unload(name).result()
    assert not any(found(corpus, [name], 1) for name in corpora)


def test_a_corpus_proposes_the_same_under_any_traffic(corpus: Corpus) -> None:
    text, traffic = np.random.default_rng(0).integers(0, 1 << 20, (2, 30_000)).astype(np.int32)
    corpus.load(B, text[:1_000]).result()
    corpus.insert(A, traffic).result()
    assert corpus.num_nodes == corpus.capacity
    assert [found(corpus, [B], *text[at : at + 3]) for at in range(0, 990, 90)] == [
        text[at + 3 : at + 8].tolist() for at in range(0, 990, 90)
    ]
    assert found(corpus, [A], *traffic[-9:-6]) == traffic[-6:-1].tolist()


def test_a_corpus_that_might_not_fit_is_refused_and_sessions_keep_their_share(corpus: Corpus) -> None:
    text, more = np.random.default_rng(0).integers(0, 1 << 20, (2, 1_000)).astype(np.int32)
    with corpus._lock:  # the thread cannot go on: what waits counts as well
        loaded = corpus.load(B, text)
        refusal = "1000 tokens may take 17848 nodes of the trie, in which corpora have 17848 of the 20000"
        with pytest.raises(ResourceExhausted, match=refusal):
            corpus.load(B, more)
    loaded.result()
    with pytest.raises(ResourceExhausted, match="corpora have 178"):
        corpus.load(("corpus", "other"), more)
    corpus.insert(A, more).result()
    assert found(corpus, [A], *more[500:503]) == more[503:508].tolist()
    corpus.unload(B).result()
    corpus.load(B, more).result()
    assert found(corpus, [B], *more[500:503]) == more[503:508].tolist()


def test_a_text_that_is_known_takes_no_room_a_second_time(corpus: Corpus) -> None:
    text = np.arange(100, dtype=np.int32)
    for _ in range(20):
        corpus.load(B, text).result()
    assert corpus.num_nodes < 2_000


def test_more_roots_than_the_trie_has_room_for_push_out_the_oldest() -> None:
    corpus = Corpus(NgramTrie(8, branch_length=4), max_pending_tokens=100)
    for number in range(6):
        corpus.insert(("text", str(number)), ids(1, 2, 3)).result()
    assert corpus.num_nodes <= 8
    assert found(corpus, [("text", "5")], 1) == [2]  # of a path of four, the newest is what fits beside four roots
    assert found(corpus, [("text", "0")], 1) == []
    corpus.close()


def test_what_waits_is_bounded() -> None:
    corpus = Corpus(NgramTrie(20_000, max_kept=10_000), max_pending_tokens=10)
    with corpus._lock:  # the thread cannot go on
        corpus.insert(A, ids(1, 2, 3, 4, 5, 6, 7, 8))
        assert corpus.insert(A, ids(1, 2, 3), 1).result() is None
        assert corpus.num_dropped_tokens == 2
        with pytest.raises(ResourceExhausted, match="takes 10"):
            corpus.load(A, ids(1, 2, 3))
    corpus.flush()
    corpus.insert(A, ids(11, 12)).result()
    assert found(corpus, [A], 11) == [12]
    corpus.close()


def test_sessions_go_before_corpora(corpus: Corpus) -> None:
    order: list[str] = []
    with corpus._lock:
        corpus.insert(("text", "first"), ids(1, 2))
        loaded = corpus.load(B, np.arange(1_000, dtype=np.int32))
        inserted = corpus.insert(A, ids(1, 2, 3))
        loaded.add_done_callback(lambda _: order.append("corpus"))
        inserted.add_done_callback(lambda _: order.append("text"))
    loaded.result()
    corpus.insert(A, ids(5, 6)).result()  # callbacks of the one before have run
    assert order == ["text", "corpus"]
    assert found(corpus, [B], 900) == [901, 902, 903, 904, 905]


def test_a_cancelled_job_is_skipped_and_the_next_is_done(corpus: Corpus) -> None:
    with corpus._lock:
        corpus.insert(("text", "first"), ids(1, 2))
        cancelled = corpus.insert(A, ids(1, 2, 3))
        assert cancelled.cancel()
        following = corpus.insert(B, ids(1, 2, 3))
    following.result()
    assert found(corpus, [A], 1) == []


def test_closing_cancels_what_waits() -> None:
    corpus = Corpus(NgramTrie(20_000), max_pending_tokens=1_000_000)
    futures = [corpus.insert(A, np.arange(100_000, dtype=np.int32)) for _ in range(3)]
    corpus.close()
    with pytest.raises(CancelledError):
        futures[-1].result()


def test_a_failed_insertion_does_not_end_the_thread(corpus: Corpus) -> None:
    broken = corpus.insert(A, np.zeros((2, 2), np.int32))
    assert broken.exception() is not None
    corpus.insert(B, ids(1, 2)).result()
    assert found(corpus, [B], 1) == [2]


def test_lookups_run_beside_insertions(corpus: Corpus) -> None:
    """Growing and evicting under the eyes of a reader never shows it a half-written trie."""
    text = np.random.default_rng(0).integers(0, 50, 20_000).astype(np.int32)
    done = corpus.insert(A, text)
    while not done.done():
        match, _ = corpus.match([A], text[5:9], MatchRules(), num_nodes=20, max_depth=9, vocab_size=1 << 20)
        assert all(parent < node for node, parent in enumerate(match.parents.tolist()))
    assert corpus.num_nodes == 40_000


def test_the_fair_lock_gives_way_to_who_waits() -> None:
    lock, order = FairLock(), []
    started = threading.Event()

    def wait_and_take() -> None:
        started.set()
        with lock:
            order.append("waiter")

    with lock:
        waiter = threading.Thread(target=wait_and_take)
        waiter.start()
        started.wait()
        while not lock._turnstile.locked():
            pass
    with lock:
        order.append("holder")
    waiter.join()
    assert order == ["waiter", "holder"]
