"""The n-gram trie against SGLang's worked vectors and against plain dictionaries."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from draft_service.drafters.trie import Match, MatchRules, NgramTrie
from draft_service.drafters.trie_ranks import BAR, COUNT, FIRST, MAX_RANKED, MIN_RANKED, rank_row
from draft_service.drafters.trie_rows import CHILD, FREQ, NEWER, NEXT, OLDER, PARENT, PREV, RANKED, TOKEN, UNRANKED
from tests.draft_service.drafters.trie_oracle import Oracle

VOCAB = 1 << 20


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def match(
    trie: NgramTrie, root: int, suffix: np.ndarray, rules: MatchRules, num_nodes: int = 7, *, max_depth: int = 1000,
    vocab_size: int = VOCAB,
) -> Match:  # fmt: skip
    return trie.match(ids(root), suffix, rules, num_nodes=num_nodes, max_depth=max_depth, vocab_size=vocab_size)


def insert(trie: NgramTrie, root: int, tokens: np.ndarray, counted: int = 0) -> None:
    """All paths of `tokens` that reach past `counted`, growing as needed."""
    start = trie.first_start(counted)
    while start < len(tokens):
        start = trie.insert_some(root, tokens, start, len(tokens), counted)
        if start < len(tokens):
            trie.adopt(trie.grown())


@pytest.fixture
def worked() -> tuple[NgramTrie, int]:
    """The corpus of the published example."""
    trie = NgramTrie(10_000, branch_length=12, min_match=1)
    root = trie.new_root()
    assert root is not None
    insert(trie, root, np.arange(1, 11, dtype=np.int32))
    insert(trie, root, ids(1, 2, 3, 44, 55, 66, 77, 88, 99, 100))
    return trie, root


@pytest.mark.parametrize(
    ("match_type", "suffix", "tokens", "parents"),
    [
        ("BFS", [1, 2, 3], [44, 4, 55, 5, 66, 6, 77], [-1, -1, 0, 1, 2, 3, 4]),
        ("PROB", [1, 2, 3], [4, 44, 5, 55, 6, 66, 7], [-1, -1, 0, 1, 2, 3, 4]),
        ("BFS", [3, 44], [55, 66, 77, 88, 99, 100], [-1, 0, 1, 2, 3, 4]),
        ("PROB", [3, 44], [55, 66, 77, 88, 99, 100], [-1, 0, 1, 2, 3, 4]),
        ("BFS", [3, 6, 999], [], []),
        ("PROB", [3, 6, 999], [], []),
    ],
)
def test_worked_vectors(
    worked: tuple[NgramTrie, int], match_type: str, suffix: list[int], tokens: list[int], parents: list[int]
) -> None:
    trie, root = worked
    found = match(trie, root, ids(*suffix), MatchRules(1, 10, 1, 8, match_type))  # type: ignore[arg-type]
    assert found.tokens.tolist() == tokens
    assert found.parents.tolist() == parents


def test_the_whole_text_is_inserted_not_only_its_end() -> None:
    trie = NgramTrie(100_000)
    root = trie.new_root()
    assert root is not None
    insert(trie, root, np.arange(2_000, dtype=np.int32))
    found = match(trie, root, ids(3, 4, 5), MatchRules())
    assert found.tokens.tolist() == list(range(6, 13))


def test_an_incremental_insertion_counts_every_occurrence_once() -> None:
    text = np.random.default_rng(0).integers(0, 4, 300).astype(np.int32)
    whole, parts = NgramTrie(100_000, branch_length=6), NgramTrie(100_000, branch_length=6)
    root = whole.new_root()
    assert root is not None
    assert parts.new_root() == root
    insert(whole, root, text)
    counted = 0
    for upto in [*range(7, 300, 3), 300]:
        insert(parts, root, text[:upto], counted)
        counted = upto
    assert counted == 300
    rules = MatchRules(1, 5, 10, 10)
    for suffix in text[:20].reshape(10, 2):
        one, other = match(whole, root, suffix, rules, 500), match(parts, root, suffix, rules, 500)
        assert paths_of(one) == pytest.approx(paths_of(other))


def paths_of(found: Match) -> dict[tuple[int, ...], float]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(found.tokens.tolist(), found.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return dict(zip(paths, found.probabilities.tolist(), strict=True))


def test_probabilities_follow_counts_and_context() -> None:
    trie = NgramTrie(10_000, branch_length=4, min_match=1)
    root = trie.new_root()
    assert root is not None
    for _ in range(3):
        insert(trie, root, ids(1, 2, 3))
    insert(trie, root, ids(1, 2, 4))
    found = paths_of(match(trie, root, ids(1, 2), MatchRules(1, 3)))
    assert found[(3,)] == pytest.approx(3 * 2 / (4 * 2 + 1))  # two tokens matched
    assert found[(4,)] == pytest.approx(1 * 2 / (4 * 2 + 1))
    short = paths_of(match(trie, root, ids(9, 1), MatchRules(1, 3)))
    assert short[(2,)] == pytest.approx(4 / 5)
    assert short[(2, 3)] == pytest.approx(4 / 5 * 3 * 2 / (4 * 2 + 1))


def test_depth_nodes_and_vocabulary_are_bounds(worked: tuple[NgramTrie, int]) -> None:
    trie, root = worked
    rules = MatchRules(1, 10, 1, 8)
    assert match(trie, root, ids(1, 2, 3), rules, max_depth=1).tokens.tolist() == [44, 4]
    assert match(trie, root, ids(1, 2, 3), rules, num_nodes=1).tokens.tolist() == [44]
    assert match(trie, root, ids(1, 2, 3), rules, num_nodes=0).tokens.tolist() == []
    assert match(trie, root, ids(1, 2, 3), rules, vocab_size=44).tokens.tolist() == [4, 5, 6, 7, 8, 9, 10]


def test_roots_are_apart_and_merge_by_path() -> None:
    trie = NgramTrie(10_000)
    one, two = trie.new_root(), trie.new_root()
    assert one is not None
    assert two is not None
    insert(trie, one, ids(1, 2, 3, 4))
    insert(trie, two, ids(1, 2, 3, 5))
    alone = match(trie, one, ids(1, 2), MatchRules())
    assert alone.tokens.tolist() == [3, 4]
    both = trie.match(ids(two, one), ids(1, 2), MatchRules(), num_nodes=7, max_depth=99, vocab_size=VOCAB)
    assert both.tokens.tolist() == [3, 5, 4]
    assert both.sources.tolist() == [3, 1, 2]


def test_a_dropped_root_returns_its_nodes_in_pieces() -> None:
    trie = NgramTrie(10_000)
    kept, dropped = trie.new_root(), trie.new_root()
    assert kept is not None
    assert dropped is not None
    insert(trie, kept, ids(1, 2, 3, 4))
    before = trie.num_nodes - 1
    insert(trie, dropped, np.arange(100, dtype=np.int32))
    pieces = 1
    while not trie.drop_some(dropped, 50):
        pieces += 1
    assert pieces > 10
    assert trie.num_nodes == before
    assert match(trie, kept, ids(1, 2), MatchRules()).tokens.tolist() == [3, 4]
    check_links(trie)


def test_arrays_start_small_and_stop_at_the_capacity() -> None:
    trie = NgramTrie(5_000)
    root = trie.new_root()
    assert root is not None
    assert trie.num_bytes < 64 * 1024
    insert(trie, root, np.random.default_rng(0).integers(0, VOCAB, 3_000).astype(np.int32))
    assert trie.num_nodes == 5_000
    assert trie.num_bytes <= 5_001 * 32 + 4 * 16_384


def test_roots_leave_room_for_a_path() -> None:
    trie = NgramTrie(7, branch_length=4, min_match=1)
    assert [trie.new_root() is None for _ in range(4)] == [False, False, False, True]
    trie = NgramTrie(7, branch_length=4, min_match=1, max_kept=2)
    assert [trie.new_root() is None for _ in range(2)] == [False, True]
    assert trie.new_root(kept=True) is not None


@pytest.mark.parametrize(("capacity", "branch_length", "min_match"), [(18, 18, 1), (100, 18, 18), (100, 18, 0)])
def test_nonsense_is_refused(capacity: int, branch_length: int, min_match: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        NgramTrie(capacity, branch_length=branch_length, min_match=min_match)


@pytest.mark.parametrize("max_kept", [-1, 82])
def test_what_is_kept_leaves_room_for_a_path(max_kept: int) -> None:
    with pytest.raises(ValueError, match=r"max_kept is .*; it must be from 0 to 81"):
        NgramTrie(100, max_kept=max_kept)


def check_links(trie: NgramTrie) -> None:
    """Every node but the roots is in one use list once, behind its parent, and in its parent's child list."""
    nodes = trie._nodes
    order: list[int] = []
    for anchor in (0, *trie._kept_roots):
        node = int(nodes[anchor, OLDER])
        while node != anchor:
            assert nodes[nodes[node, OLDER], NEWER] == node
            order.append(node)
            node = int(nodes[node, OLDER])
        assert anchor == 0 or trie.num_kept >= len(trie._kept_roots)
        if anchor == 0:
            assert trie.num_kept == trie.num_nodes - len(order) - (trie.num_roots - len(trie._kept_roots))
    assert len(order) == len(set(order)) == trie.num_nodes - trie.num_roots
    place = {node: at for at, node in enumerate(order)}
    for node in order:
        parent = int(nodes[node, PARENT])
        assert place.get(parent, -1) < place[node]
        before, after = nodes[node, PREV], nodes[node, NEXT]
        assert (nodes[parent, CHILD] if before <= 0 else nodes[before, NEXT]) == node
        assert after == 0 or nodes[after, PREV] == node
    for node in order:  # the table holds exactly the children that have siblings
        hashed = bool(nodes[node, PREV] > 0 or nodes[node, NEXT])
        assert int((trie._table == node).sum()) == hashed
    check_ranks(trie, order)


def check_ranks(trie: NgramTrie, order: list[int]) -> None:
    """Children are counted up to MAX_RANKED; beyond, the bar parts those that are ranked from the others."""
    nodes, ranks, used = trie._nodes, trie._ranks, set[int]()
    for node in order:
        if nodes[node, CHILD] == 0:
            continue
        children = children_of(trie, node)
        row = int(rank_row(nodes, node))
        if row == 0:
            assert nodes[children[0], PREV] == -len(children)
            assert len(children) <= MAX_RANKED
            continue
        assert row not in used
        used.add(row)
        ranked = ranks[row, FIRST : FIRST + ranks[row, COUNT]].tolist()
        others = set(children) - set(ranked)
        assert MIN_RANKED <= len(set(ranked)) == len(ranked) <= len(children)
        assert set(ranked) <= set(children)
        assert all(nodes[child, FREQ] >= ranks[row, BAR] for child in ranked)
        assert all(nodes[child, FREQ] <= ranks[row, BAR] for child in others)
    free, row = set[int](), int(trie._state[UNRANKED])
    while row != 0:
        free.add(row)
        row = int(ranks[row, COUNT])
    assert free | used == set(range(1, int(trie._state[RANKED])))
    assert not free & used


def children_of(trie: NgramTrie, node: int) -> list[int]:
    found, child = [], int(trie._nodes[node, CHILD])
    while child != 0:
        found.append(child)
        child = int(trie._nodes[child, NEXT])
    return found


def counts(trie: NgramTrie, path: tuple[int, ...], node: int) -> dict[tuple[int, ...], int]:
    """The number of times that each path below `node` was inserted."""
    found: dict[tuple[int, ...], int] = {}
    for child in children_of(trie, node):
        below = (*path, int(trie._nodes[child, TOKEN]))
        found[below] = int(trie._nodes[child, FREQ])
        found |= counts(trie, below, child)
    return found


def test_many_rare_continuations_do_not_hide_the_frequent_one() -> None:
    trie = NgramTrie(10_000, branch_length=6)
    root = trie.new_root()
    assert root is not None
    for _ in range(500):
        insert(trie, root, ids(1, 2, 3))
    for other in range(100, 300):
        insert(trie, root, ids(1, other, 3))
    found = match(trie, root, ids(9, 1), MatchRules(match_type="PROB"), 2)
    assert found.tokens.tolist() == [2, 3]
    assert found.probabilities[0] == pytest.approx(500 / 701)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), capacity=st.sampled_from([150, 400, 1_000, 5_000]), kept=st.booleans(),
    steepness=st.sampled_from([1.1, 1.5, 3.0]), breadth=st.integers(1, MIN_RANKED),
)  # fmt: skip
def test_the_most_frequent_of_any_number_of_children_are_proposed(
    seed: int, capacity: int, kept: bool, steepness: float, breadth: int
) -> None:
    """Against all children, sorted; what is frequent changes, and eviction takes some."""
    random = np.random.default_rng(seed)
    trie = NgramTrie(capacity + 2_000, branch_length=3, max_kept=1_900 if kept else 0)
    corpus, root = trie.new_root(kept=kept), trie.new_root()
    assert corpus is not None
    assert root is not None
    rules = MatchRules(1, 2, 1, breadth, "PROB")
    for _ in range(12):
        names = random.permutation(400) + 2
        text = np.ones(2 * random.integers(1, 150), np.int32)
        text[1::2] = names[np.minimum(random.zipf(steepness, len(text) // 2), 400) - 1]
        for below in (corpus, root):
            if below == root or not kept or trie.num_kept + trie.most_nodes(len(text)) <= trie.max_kept:
                insert(trie, below, text, int(random.integers(0, 3)))
            check_proposed(trie, below, rules)
    check_links(trie)
    while not trie.drop_some(corpus, 50):
        pass
    check_links(trie)
    check_proposed(trie, root, rules)


def check_proposed(trie: NgramTrie, root: int, rules: MatchRules) -> None:
    freqs = {path[1]: freq for path, freq in counts(trie, (), root).items() if len(path) == 2 and path[0] == 1}
    best = sorted(freqs, key=lambda token: (-freqs[token], token))
    found = match(trie, root, ids(1), rules, num_nodes=rules.max_breadth, max_depth=1).tokens.tolist()
    assert [freqs[token] for token in found] == [freqs[token] for token in best[: rules.max_breadth]]
    least = freqs[found[-1]] if found else 0
    assert [token for token in found if freqs[token] > least] == [token for token in best if freqs[token] > least]


tokens = st.lists(st.integers(0, 3), min_size=1, max_size=12)


class TrieMachine(RuleBasedStateMachine):
    """Random insertions, incremental ones, dropped roots and lookups, with a capacity that forces eviction."""

    @initialize(
        capacity=st.integers(8, 80), branch_length=st.integers(2, 5), min_match=st.integers(1, 2),
        share=st.floats(0, 1, exclude_max=True),
    )  # fmt: skip
    def start(self, capacity: int, branch_length: int, min_match: int, share: float) -> None:
        min_match = min(min_match, branch_length - 1)
        max_kept = int(share * (capacity - branch_length))
        self.trie = NgramTrie(capacity, branch_length=branch_length, min_match=min_match, max_kept=max_kept)
        self.oracle = Oracle(capacity, branch_length, min_match)
        self.texts: dict[int, list[int]] = {}
        self.add_root(kept=False)

    @rule(kept=st.booleans())
    def add_root(self, kept: bool) -> None:
        if kept and self.trie.num_kept == self.trie.max_kept:
            return
        root = self.trie.new_root(kept=kept)
        if root is None:
            num_evictable = len(self.texts) - len(self.oracle.kept)
            assert num_evictable + 1 + self.trie.branch_length > self.trie.capacity - self.trie.max_kept
            return
        assert root not in self.texts
        self.texts[root] = []
        self.oracle.add_root(root, kept=kept)

    def has_room(self, root: int, text: list[int]) -> bool:
        most = self.trie.num_kept + self.trie.most_nodes(len(text))
        return root not in self.oracle.kept or most <= self.trie.max_kept

    @rule(data=st.data(), text=tokens)
    def insert(self, data: st.DataObject, text: list[int]) -> None:
        root = data.draw(st.sampled_from(sorted(self.texts)))
        if not self.has_room(root, text):
            return
        insert(self.trie, root, ids(*text))
        self.oracle.insert(root, text, 0)

    @rule(data=st.data(), more=tokens)
    def extend(self, data: st.DataObject, more: list[int]) -> None:
        """A text that grows piece by piece, as a session's does."""
        root = data.draw(st.sampled_from(sorted(self.texts)))
        counted = len(self.texts[root])
        if not self.has_room(root, self.texts[root] + more):
            return
        self.texts[root] += more
        insert(self.trie, root, ids(*self.texts[root]), counted)
        self.oracle.insert(root, self.texts[root], counted)

    @rule(data=st.data(), limit=st.integers(1, 9))
    def drop(self, data: st.DataObject, limit: int) -> None:
        root = data.draw(st.sampled_from(sorted(self.texts)))
        if len(self.texts) == 1:
            return
        while not self.trie.drop_some(root, limit):
            pass
        self.oracle.drop(root)
        del self.texts[root]

    @rule(
        data=st.data(), suffix=tokens, match_type=st.sampled_from(["BFS", "PROB"]), num_nodes=st.integers(0, 12),
        max_depth=st.integers(1, 5), breadth=st.integers(1, 4), more=st.integers(0, 4),
    )  # fmt: skip
    def look_up(
        self, data: st.DataObject, suffix: list[int], match_type: str, num_nodes: int, max_depth: int, breadth: int,
        more: int,
    ) -> None:  # fmt: skip
        roots = data.draw(st.lists(st.sampled_from(sorted(self.texts)), min_size=1, max_size=3, unique=True))
        rules = MatchRules(1, 4, breadth, breadth + more, match_type)  # type: ignore[arg-type]
        found = self.trie.match(
            ids(*roots), ids(*suffix), rules, num_nodes=num_nodes, max_depth=max_depth, vocab_size=VOCAB
        )
        expected = self.oracle.match(roots, suffix, rules, num_nodes, max_depth)
        assert (found.tokens.tolist(), found.parents.tolist(), found.sources.tolist()) == expected
        above = [found.probabilities[parent] if parent >= 0 else 1.0 for parent in found.parents]
        assert all(0 < p < q for p, q in zip(found.probabilities, above, strict=True))

    @invariant()
    def same_nodes(self) -> None:
        if hasattr(self, "trie"):
            assert self.trie.num_nodes == self.oracle.num_nodes <= self.trie.capacity
            check_links(self.trie)
            for root in self.texts:
                expected = {path: freq for path, freq in self.oracle.freq.items() if path[0] == root}
                assert counts(self.trie, (root,), root) == expected


TestTrieMachine = TrieMachine.TestCase
TestTrieMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
