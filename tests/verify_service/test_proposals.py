"""ProposalBook against a model that keeps every proposal as sent and works matching out from the words of the rules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.errors import InvalidArgument
from outrider.tree import ROOT, TokenTree
from verify_service.proposals import Match, Proposal, ProposalBook, Refusal, Refused

ALPHABET = 2
MAX_KEPT, MAX_ASSUMED = 3, 4


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def proposal(
    proposal_id: int,
    base_len: int,
    assumed: list[int],
    tokens: list[int],
    parents: list[int] | None = None,
    scores: list[int] | None = None,
) -> Proposal:
    tree = TokenTree.chain(ids(tokens)) if parents is None else TokenTree(ids(tokens), ids(parents))
    raised = tree.raised(np.array(scores, np.uint8)) if scores else np.empty(0, np.uint8)
    return Proposal(proposal_id, base_len, ids(assumed), tree, raised)


class Watched:
    """Committed tokens of a long output, and how many of them were looked at."""

    def __init__(self, length: int) -> None:
        self._tokens = np.zeros(length, np.int32)
        self.num_read = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, where: slice) -> np.ndarray:
        found = self._tokens[where]
        self.num_read += len(found)
        return found


def test_of_a_long_output_no_more_is_looked_at_than_a_proposal_may_walk() -> None:
    committed = Watched(100_000)
    kept = book()
    for number, tokens in enumerate(([1], [0], [0, 0, 0, 1]), 1):
        (refused,) = kept.add(proposal(number, 2, [0, 0], tokens), committed)  # type: ignore[arg-type]
        assert refused == Refused(number, Refusal.STALE)
    assert committed.num_read == 2 + 2 + 2 + 2 + 2 + 5


def book(prompt_len: int = 2, max_kept: int = 8, max_assumed: int = 64) -> ProposalBook:
    return ProposalBook(prompt_len=prompt_len, max_kept=max_kept, max_assumed=max_assumed)


@dataclass
class Outcome:
    """What the words say of one proposal at one committed length."""

    kind: str  # pending, match, declines, gone
    root_node: int = ROOT


def outcome(sent: Proposal, committed: list[int]) -> Outcome:
    """The committed tokens from base_len on are walked through `assumed`, then through the proposal's own nodes."""
    assumed, since = sent.assumed.tolist(), committed[sent.base_len :]
    if assumed[: len(since)] != since[: len(assumed)]:
        return Outcome("gone")
    if len(since) < len(assumed):
        return Outcome("pending")
    node = ROOT
    for token in since[len(assumed) :]:
        below = [
            i
            for i, (t, p) in enumerate(zip(sent.tree.tokens, sent.tree.parents, strict=True))
            if (t, p) == (token, node)
        ]
        if not below:
            return Outcome("gone")
        (node,) = below
    if not len(sent.tree):
        return Outcome("declines")
    return Outcome("match", node) if node in sent.tree.parents else Outcome("gone")


def below(sent: Proposal, root: int) -> list[int]:
    """Nodes that have `root` above them."""
    found: list[int] = []
    for node in range(len(sent.tree)):
        above = node
        while above not in (ROOT, root):
            above = int(sent.tree.parents[above])
        if node != root and above == root:
            found.append(node)
    return found


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(draw(st.integers(0, 7))):
        parent = draw(st.integers(-1, node - 1))
        token = draw(st.integers(0, ALPHABET - 1))
        if (token, parent) not in zip(tokens, parents, strict=True):
            tokens.append(token)
            parents.append(min(parent, len(tokens) - 2))
            if (tokens[-1], parents[-1]) in list(zip(tokens, parents, strict=True))[:-1]:
                del tokens[-1], parents[-1]
    return tokens, parents


class Book(RuleBasedStateMachine):
    """Adds, commits and verifies in any order."""

    @initialize(prompt=st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=3))
    def start(self, prompt: list[int]) -> None:
        self.prompt_len = len(prompt)
        self.committed = prompt
        self.book = book(self.prompt_len, MAX_KEPT, MAX_ASSUMED)
        self.last_id = 0
        self.kept: list[Proposal] = []
        self.verifying: Proposal | None = None
        self.used: set[int] = set()

    @rule(
        step=st.integers(-1, 2),
        back=st.integers(-1, 4),
        assumed=st.lists(st.integers(0, ALPHABET - 1), max_size=MAX_ASSUMED + 1),
        tree=trees(),
    )
    def add(self, step: int, back: int, assumed: list[int], tree: tuple[list[int], list[int]]) -> None:
        self.offer(proposal(self.last_id + step, len(self.committed) - back, assumed, *tree))

    @rule(
        back=st.integers(0, 3),
        cut=st.integers(0, 3),
        ahead=st.lists(st.integers(0, ALPHABET - 1), max_size=2),
        tree=trees(),
    )
    def add_what_has_come_true(self, back: int, cut: int, ahead: list[int], tree: tuple[list[int], list[int]]) -> None:
        """Agrees with all that is committed: some of it assumed, the rest a chain that ends in the tree."""
        base_len = max(self.prompt_len, len(self.committed) - back)
        agreed = self.committed[base_len:]
        assumed, chain = agreed[:cut], agreed[cut:]
        if cut >= len(agreed):
            assumed = agreed + ahead
        tokens = [*chain, *tree[0]]
        parents = [*range(-1, len(chain) - 1), *(parent + len(chain) for parent in tree[1])]
        self.offer(proposal(self.last_id + 1, base_len, assumed, tokens, parents))

    def offer(self, sent: Proposal) -> None:
        if 1 <= sent.proposal_id <= self.last_id:
            assert self.book.add(sent, ids(self.committed)) == [Refused(sent.proposal_id, Refusal.REPLAYED)]
            return
        in_range = self.prompt_len <= sent.base_len <= len(self.committed)
        if sent.proposal_id < 1 or not in_range or len(sent.assumed) > MAX_ASSUMED:
            with pytest.raises(InvalidArgument):
                self.book.add(sent, ids(self.committed))
            return
        self.last_id = sent.proposal_id
        expected: list[Refused] = []
        if outcome(sent, self.committed).kind == "gone":
            if len(sent.tree):
                expected.append(Refused(sent.proposal_id, Refusal.STALE))
        else:
            self.kept.append(sent)
            while len(self.kept) > MAX_KEPT:
                crowded = self.kept.pop(0).proposal_id
                if crowded not in self.used:
                    expected.append(Refused(crowded, Refusal.CROWDED))
        assert self.book.add(sent, ids(self.committed)) == expected

    @rule(tokens=st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=4))
    def commit(self, tokens: list[int]) -> None:
        self.committed = self.committed + tokens
        everything = self.kept if self.verifying is None else [*self.kept, self.verifying]
        everything.sort(key=lambda sent: sent.proposal_id)
        self.kept = [sent for sent in everything if outcome(sent, self.committed).kind != "gone"]
        self.verifying = None
        gone = [
            Refused(sent.proposal_id, Refusal.STALE)
            for sent in everything
            if sent not in self.kept and len(sent.tree) and sent.proposal_id not in self.used
        ]
        assert sorted(self.book.advance(ids(self.committed))) == gone

    @precondition(lambda self: self.verifying is None)
    @rule()
    def verify(self) -> None:
        match = self.book.match()
        if match is None:
            return
        self.book.begin(match)
        self.kept.remove(match.proposal)
        self.used.add(match.proposal.proposal_id)
        self.verifying = match.proposal

    @rule(data=st.data())
    def commit_what_was_verified(self, data: st.DataObject) -> None:
        """A path of the verified tree and a bonus: the usual way for a proposal to match again."""
        if self.verifying is None:
            return
        found = outcome(self.verifying, self.committed)
        path: list[int] = []
        node = found.root_node
        while True:
            children = [i for i, parent in enumerate(self.verifying.tree.parents) if parent == node]
            node = data.draw(st.sampled_from([*children, None]))
            if node is None:
                break
            path.append(int(self.verifying.tree.tokens[node]))
        self.commit([*path, data.draw(st.integers(0, ALPHABET - 1))])

    @invariant()
    def matches_what_the_words_say(self) -> None:
        matching = [sent for sent in self.kept if outcome(sent, self.committed).kind == "match"]
        found = self.book.match()
        assert self.book.declined() == any(outcome(sent, self.committed).kind == "declines" for sent in self.kept)
        assert len(self.book) == len(self.kept) + (self.verifying is not None)
        if not matching:
            assert found is None
            return
        best = max(matching, key=lambda sent: (sent.base_len, sent.proposal_id))
        assert found is not None
        assert found.proposal is best
        assert found.root_node == outcome(best, self.committed).root_node
        self.check_nodes(found)

    @staticmethod
    def check_nodes(found: Match) -> None:
        sent, nodes = found.proposal, found.nodes.tolist()
        assert nodes == below(sent, found.root_node)
        assert found.tree.tokens.tolist() == [int(sent.tree.tokens[node]) for node in nodes]
        parents = [int(sent.tree.parents[node]) for node in nodes]
        assert [found.root_node if p == ROOT else nodes[p] for p in found.tree.parents.tolist()] == parents


TestBook = Book.TestCase
TestBook.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_a_walk_that_ends_on_a_leaf_is_stale() -> None:
    kept = book()
    assert kept.add(proposal(1, 2, [], [7, 8]), ids([0, 0])) == []
    assert kept.advance(ids([0, 0, 7])) == []
    assert kept.advance(ids([0, 0, 7, 8])) == [Refused(1, Refusal.STALE)]


def test_a_late_decline_is_dropped_in_silence() -> None:
    kept = book()
    assert kept.add(proposal(1, 2, [5], []), ids([0, 0, 6])) == []
    assert kept.add(proposal(2, 2, [], []), ids([0, 0, 6])) == []
    assert not kept.declined()
    assert len(kept) == 0


def test_a_decline_ends_the_wait_at_its_position_only() -> None:
    kept = book()
    kept.add(proposal(1, 2, [5], []), ids([0, 0]))
    assert not kept.declined()
    kept.advance(ids([0, 0, 5]))
    assert kept.declined()
    assert kept.advance(ids([0, 0, 5, 1])) == []
    assert not kept.declined()


def test_what_was_verified_never_counts_as_stale() -> None:
    kept = book()
    committed = [0, 0]
    kept.add(proposal(1, 2, [], [1, 2, 3, 4]), ids(committed))
    for token in (1, 2):
        match = kept.match()
        assert match is not None
        kept.begin(match)
        committed.append(token)
        assert kept.advance(ids(committed)) == []
    match = kept.match()
    assert match is not None
    assert (match.root_node, match.nodes.tolist()) == (1, [2, 3])
    assert kept.advance(ids([*committed, 9])) == []


def test_beginning_what_is_not_kept_is_an_error() -> None:
    kept = book()
    kept.add(proposal(1, 2, [], [1]), ids([0, 0]))
    match = kept.match()
    assert match is not None
    kept.begin(match)
    with pytest.raises(ValueError, match="proposal 1 is not kept"):
        kept.begin(match)


def test_of_the_nodes_below_the_root_the_likeliest_are_kept_and_a_child_is_never_likelier_than_its_parent() -> None:
    kept = book()
    #        -1 -> 0(9) -> 1(1) -> 3(2), -1 -> 2(5) -> 4(5)
    kept.add(proposal(1, 2, [], [1, 2, 3, 4, 5], [-1, 0, -1, 1, 2], [9, 1, 5, 2, 5]), ids([0, 0]))
    match = kept.match()
    assert match is not None
    assert match.scores.tolist() == [9, 9, 5, 9, 5]
    assert [match.kept(n, 9).nodes.tolist() for n in range(6)] == [
        [],
        [2],
        [2, 4],
        [0, 2, 4],
        [0, 1, 2, 4],
        [0, 1, 2, 3, 4],
    ]
    assert match.kept(5, 1).nodes.tolist() == [0, 2]


@pytest.mark.parametrize("base_len", [-1, 0, 1, 4, 2**31 - 1])
def test_a_base_len_outside_prompt_and_committed_is_malformed(base_len: int) -> None:
    with pytest.raises(InvalidArgument, match=f"base_len is {base_len}; it must be from the prompt's 2 to 3") as caught:
        book().add(proposal(1, base_len, [], [1]), ids([0, 0, 0]))
    assert caught.value.field == "base_len"


@pytest.mark.parametrize("committed", [[0, 0], [0, 0, 7]])
def test_an_id_of_0_is_malformed(committed: list[int]) -> None:
    kept = book()
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="proposal_id is 0; ids begin at 1") as caught:
            kept.add(proposal(0, 2, [], [7]), ids(committed))
        assert caught.value.field == "proposal_id"
        kept.add(proposal(1, 2, [], [7]), ids(committed))


#        -1 -> 0 -> 2 -> 3, -1 -> 1
BRANCHED = [21, 30, 22, 23], [-1, -1, 0, 2]


@pytest.mark.parametrize(
    ("assumed", "came", "detail"),
    [
        ([306], [165], "assumed[0] is 306; 165 is committed at 2"),
        ([5, 306], [5, 165, 21], "assumed[1] is 306; 165 is committed at 3"),
        ([], [31], "no child of the root is 31, which is committed at 2"),
        ([5], [5, 31], "no child of the root is 31, which is committed at 3"),
        ([], [21, 22, 24], "no child of node 2 is 24, which is committed at 4"),
        ([], [30, 31], "no child of node 1 is 31, which is committed at 3"),
        ([], [30], "node 1 is committed at 2, and nothing hangs below it"),
        ([5], [5, 21, 22, 23], "node 3 is committed at 5, and nothing hangs below it"),
    ],
)
def test_where_a_stale_proposal_differs_is_said(assumed: list[int], came: list[int], detail: str) -> None:
    stale, committed = [Refused(1, Refusal.STALE, detail)], ids([0, 0, *came])
    assert book().add(proposal(1, 2, assumed, *BRANCHED), committed, explain=True) == stale
    kept = book()
    assert kept.add(proposal(1, 2, assumed, *BRANCHED), ids([0, 0]), explain=True) == []
    assert kept.advance(committed, explain=True) == stale


def test_more_assumed_tokens_than_the_limit_are_malformed() -> None:
    with pytest.raises(InvalidArgument, match="assumed has 3 tokens; at most 2 are taken") as caught:
        book(max_assumed=2).add(proposal(1, 2, [1, 2, 3], [1]), ids([0, 0]))
    assert caught.value.field == "assumed"


def test_scores_below_a_new_root_count_from_there() -> None:
    kept = book()
    kept.add(proposal(1, 2, [], [1, 2, 3], [-1, 0, 1], [100, 110, 255]), ids([0, 0]))
    kept.advance(ids([0, 0, 1]))
    match = kept.match()
    assert match is not None
    assert match.scores.tolist() == [10, 155]


def test_the_worked_example_of_the_protocol_page() -> None:
    prompt = [11, 12, 13]
    tree = [21, 30, 22, 23], [-1, -1, 0, 2]
    kept = book(prompt_len=3)
    kept.add(proposal(1, 4, [], *tree), ids([*prompt, 20]))
    match = kept.match()
    assert match is not None
    assert (match.root_node, match.nodes.tolist(), match.tree.depths.tolist()) == (-1, [0, 1, 2, 3], [1, 1, 2, 3])
    kept.begin(match)
    kept.add(proposal(2, 4, [21, 22, 23], [24]), ids([*prompt, 20]))
    kept.add(proposal(3, 4, [21, 22, 40], [41, 42], [-1, 0]), ids([*prompt, 20]))
    assert kept.advance(ids([*prompt, 20, 21, 22, 40])) == [Refused(2, Refusal.STALE)]
    match = kept.match()
    assert match is not None
    assert (match.proposal.proposal_id, match.root_node, match.nodes.tolist()) == (3, -1, [0, 1])
    late = book(prompt_len=3)
    late.add(proposal(1, 4, [], *tree), ids([*prompt, 20, 21]))
    match = late.match()
    assert match is not None
    assert (match.root_node, match.nodes.tolist(), match.tree.depths.tolist()) == (0, [2, 3], [1, 2])
    assert book(prompt_len=3).add(proposal(1, 4, [], *tree), ids([*prompt, 20, 30])) == [Refused(1, Refusal.STALE)]
