"""STANDALONE: a perfect drafter, its trees against the rules, and what becomes of its pages."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from draft_service.drafters import factory, standalone
from draft_service.drafters.base import AheadRequest, Draft, DraftRequest, GivenUp, TextRequest
from draft_service.drafters.models import LanguageModel, Tips
from draft_service.drafters.shape import TreeShape
from draft_service.drafters.standalone import StandaloneDrafter
from draft_service.session import Session, Wishes
from draft_service.sessions import InVerification
from engine.feature_spec import FeatureSpec
from engine.runner import ModelRunner
from outrider.args import DraftArgs
from outrider.errors import InvalidArgument, ResourceExhausted, StartupError
from outrider.tree import TokenTree
from outrider.v1 import common_pb2, verify_pb2
from tests.draft_service import model_rig
from tests.draft_service.model_rig import Game, Target, assert_same_tree, grown, session
from tests.engine.tiny import VOCAB_SIZE, save_model

NUM_SLOTS = 1200
CHAIN = TreeShape(3, 1, 4)
PROMPTS = [[5, 9, 33], [70], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [90, 4], [8, 8, 8], [17, 40], [2, 60, 61], [55] * 20]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_model("llama", folder)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same vocabulary: often wrong."""
    folder = tmp_path_factory.mktemp("small")
    save_model("llama-tied", folder)
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target(folder, FeatureSpec())


def make(
    folder: Path, shape: TreeShape = CHAIN, *, num_slots: int = NUM_SLOTS, max_len: int = 200,
    table_rows: int = 24, **options: Any,
) -> StandaloneDrafter:  # fmt: skip
    runner = ModelRunner.load(
        folder, dtype="float32", num_slots=num_slots, max_sessions=table_rows, max_len=max_len,
        output_rows=options.get("token_map"),
    )  # fmt: skip
    model = LanguageModel(runner, num_slots, max_batch_tokens=512, **options)
    return StandaloneDrafter(model, shape, draft_model="tiny", target=common_pb2.ModelInfo())


def assert_empty(drafter: StandaloneDrafter) -> None:
    cache = drafter.model.cache
    cache.check([])
    assert cache.num_free == NUM_SLOTS


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("num_steps", [1, 3, 5])
def test_a_perfect_drafter_commits_a_whole_chain_and_the_bonus_each_round(
    folder: Path, target: Target, batch: int, num_steps: int
) -> None:
    drafter = make(folder, TreeShape(num_steps, 1, num_steps + 1))
    game = Game(drafter, target)
    game.open(*PROMPTS[:batch])
    for _ in range(5):
        assert game.round() == [num_steps + 1] * batch
    drafter.close(game.sessions)
    assert_empty(drafter)


def test_the_targets_own_int8_copy_is_nearly_perfect(folder: Path, target: Target) -> None:
    """A round has at most 4 tokens; how many, the rounding of these random weights decides."""
    runner = ModelRunner.load(
        folder, dtype="float32", num_slots=NUM_SLOTS, max_sessions=24, max_len=200, quantization="int8"
    )
    drafter = StandaloneDrafter(
        LanguageModel(runner, NUM_SLOTS, max_batch_tokens=512), CHAIN, draft_model="int8", target=common_pb2.ModelInfo()
    )
    game = Game(drafter, target)
    game.open(*PROMPTS)
    committed = [length for _ in range(8) for length in game.round()]
    assert 3.5 <= np.mean(committed) <= 4.0


def test_output_is_the_targets_whatever_the_drafter_says(small: Path, target: Target) -> None:
    drafter = make(small, TreeShape(4, 3, 12))
    game = Game(drafter, target)
    game.open(*PROMPTS)
    for _ in range(4):
        game.round()
    for opened, prompt in zip(game.sessions, PROMPTS, strict=True):
        text = list(prompt)
        while len(text) < len(opened.tokens):
            text.append(target.next(text))
        assert opened.tokens.tolist() == text


def chances(target: Target, text: list[int]) -> Any:
    def after(path: list[int]) -> dict[int, float]:
        return dict(enumerate(target.run(text + path)[0][-1].softmax(-1).tolist()))

    return after


@pytest.mark.parametrize(("num_steps", "topk", "num_nodes"), [(1, 1, 1), (4, 1, 4), (1, 5, 3), (3, 2, 5), (5, 4, 7)])
def test_trees_follow_the_rules(small: Path, target: Target, num_steps: int, topk: int, num_nodes: int) -> None:
    drafter = make(small, TreeShape(num_steps, topk, num_nodes + 1))
    own = Target(small, FeatureSpec())
    game = Game(drafter, target)
    game.open(*PROMPTS[:4])
    for _ in range(2):
        game.round()
        for opened, draft in zip(game.sessions, game.draft(), strict=True):
            text = opened.tokens.tolist()
            assert_same_tree(draft, grown(chances(own, text), num_steps, topk, num_nodes))
            assert (draft.parents < np.arange(len(draft))).all()


def test_sessions_drafted_together_get_what_they_get_alone(small: Path, target: Target) -> None:
    shape = TreeShape(3, 3, 9)
    together = Game(make(small, shape), target)
    together.open(*PROMPTS)
    together.round()
    for prompt, draft in zip(PROMPTS, together.draft(), strict=True):
        alone = Game(make(small, shape), target)
        alone.open(prompt)
        alone.round()
        (own,) = alone.draft()
        assert draft.tokens.tolist() == own.tokens.tolist()
        assert draft.parents.tolist() == own.parents.tolist()


def test_coalesced_verdicts_and_rounds_without_a_draft_are_caught_up_with(folder: Path, target: Target) -> None:
    drafter = make(folder)
    game = Game(drafter, target)
    (opened,) = game.open(PROMPTS[0])
    drafter.extend([game.commit(opened, []) for _ in range(7)])
    drafter.extend([game.commit(opened, [])])
    assert game.round() == [4]


def test_long_prompts_are_run_over_several_calls(folder: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draft_service.drafters.session_drafter.MAX_ROWS_PER_CALL", 16)
    drafter = make(folder)
    game = Game(drafter, target)
    long, short = game.open(list(range(60)), [5, 6])
    drafts = game.draft()
    assert [len(draft) for draft in drafts] == [0, 3]
    for _ in range(4):
        drafts = game.draft()
    assert [len(draft) for draft in drafts] == [3, 3]
    assert game.accepted(long, drafts[0]) == drafts[0].tokens.tolist()
    assert game.accepted(short, drafts[1]) == drafts[1].tokens.tolist()


def test_a_prompt_alone_is_drafted_for_too(folder: Path, target: Target) -> None:
    drafter = make(folder)
    opened = session(PROMPTS[0])
    drafter.open([opened])
    (draft,) = drafter.draft([DraftRequest(opened, 3)])
    assert draft.tokens.tolist() == [target.next(PROMPTS[0]), *draft.tokens.tolist()[1:]]
    assert len(draft) == 3


# ---- What bounds a tree


def test_wishes_limits_and_the_ends_of_output_and_context(small: Path, target: Target) -> None:
    drafter = make(small, TreeShape(3, 2, 6), max_len=40)
    game = Game(drafter, target)

    def one(num_nodes: int, prompt: list[int] = PROMPTS[0], **more: Any) -> Draft:
        opened = session(prompt, **more)
        drafter.open([opened])
        (draft,) = drafter.draft([DraftRequest(opened, num_nodes)])
        drafter.close([opened])
        return draft

    assert len(one(5)) == 5
    assert len(one(0)) == 0
    assert len(one(100)) == 2 + 2 * 4
    chain = one(9, wishes=Wishes(num_steps=6, topk=1))
    assert chain.parents.tolist() == [-1, 0, 1, 2, 3, 4]
    assert max(one(9, remaining=2).tree.depths) == 1
    assert len(one(9, remaining=1)) == 0
    # The last token of the context sits at position 39: the tree's deepest node, which is not run, at 40 at most.
    assert max(one(9, [7] * 39).tree.depths) == 2
    assert max(one(9, [7] * 40).tree.depths) == 1
    assert one(9, wishes=Wishes(topk=500), remaining=2).parents.tolist() == [-1] * 9
    assert game.drafter.take_given_up() == []


def test_ids_beyond_the_targets_vocabulary_are_never_drafted(folder: Path, tmp_path: Path) -> None:
    drafter = make(folder, TreeShape(3, 4, 16))
    opened = session(PROMPTS[0], vocab_size=12)
    drafter.open([opened])
    (draft,) = drafter.draft([DraftRequest(opened, 15)])
    assert len(draft) == 15
    assert draft.tokens.max() < 12


def test_a_token_map_confines_drafts_and_their_probabilities(small: Path, target: Target, tmp_path: Path) -> None:
    kept = [3, 50, 7, 90, 61, 22]
    drafter = make(small, TreeShape(3, 2, 6), token_map=torch.tensor(kept))
    own = Target(small, FeatureSpec())
    game = Game(drafter, target)
    (opened,) = game.open(PROMPTS[2])
    text = opened.tokens.tolist()

    def after(path: list[int]) -> dict[int, float]:
        logits = own.run(text + path)[0][-1]
        return dict(zip(kept, logits[kept].softmax(-1).tolist(), strict=True))

    assert_same_tree(game.draft()[0], grown(after, 3, 2, 5))


def test_a_token_map_reaches_no_further_than_the_targets_vocabulary(small: Path) -> None:
    drafter = make(small, TreeShape(3, 2, 6), token_map=torch.tensor([3, 50, 7, 90, 61, 22]))
    for vocab_size, allowed in ((60, {3, 50, 7, 22}), (40, {3, 7, 22})):
        opened = session([5, 6], vocab_size=vocab_size)
        drafter.open([opened])
        (draft,) = drafter.draft([DraftRequest(opened, 5)])
        assert len(draft) == 5
        assert set(draft.tokens.tolist()) <= allowed
        drafter.close([opened])


def test_a_session_with_a_token_that_the_model_cannot_read_is_given_up(folder: Path) -> None:
    drafter = make(folder)
    bad, good = session([5, VOCAB_SIZE]), session([5, 6])
    drafter.open([bad, good])
    drafts = drafter.draft([DraftRequest(bad, 3), DraftRequest(good, 3)])
    assert [len(draft) for draft in drafts] == [0, 3]
    (given,) = drafter.take_given_up()
    assert given.session is bad
    assert given.reason == verify_pb2.RELEASE_REASON_ERROR
    assert "token 96 is outside the draft model's vocabulary of 96" in given.detail
    drafter.close([bad, good])
    assert_empty(drafter)


# ---- Room


def test_without_room_a_session_is_given_up_and_the_others_go_on(folder: Path, target: Target) -> None:
    drafter = make(folder, num_slots=60)
    small, large = session([5, 6]), session(list(range(59)))
    drafter.open([small, large])
    assert [given.session for given in drafter.take_given_up()] == [large]
    assert drafter.take_given_up() == []
    game = Game(drafter, target)
    game.sessions = [small]
    drafter.extend([game.commit(small, [])])
    assert game.round() == [4]
    # What a tree needs while it grows counts too.
    other = session(list(range(56)))
    drafter.open([other])
    assert [len(draft) for draft in drafter.draft([DraftRequest(other, 3)])] == [0]
    (given,) = drafter.take_given_up()
    assert given.reason == verify_pb2.RELEASE_REASON_CAPACITY
    drafter.close([small, large, other])
    drafter.model.cache.check([])


def test_the_slot_table_is_a_limit_too(folder: Path) -> None:
    drafter = make(folder, table_rows=2)
    opened = [session([5, 6]) for _ in range(3)]
    drafter.open(opened)
    (given,) = drafter.take_given_up()
    assert given.session is opened[2]
    assert "rows of the slot table" in given.detail


def test_trees_that_do_not_fit_together_grow_in_turns(small: Path, target: Target) -> None:
    shape = TreeShape(3, 3, 9)
    tight, roomy = Game(make(small, shape, num_slots=70), target), Game(make(small, shape), target)
    for game in (tight, roomy):
        game.open(*PROMPTS[:7])
    for one, other in zip(tight.draft(), roomy.draft(), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
    assert tight.drafter.take_given_up() == []


# ---- Ahead


def ahead(drafter: StandaloneDrafter, opened: Any, draft: Draft, **limits: int) -> list[Draft]:
    verifying = InVerification(opened, draft.tree, draft.probabilities)
    bounds: dict[str, Any] = {"num_nodes": 5, "max_assumed": 8, "max_outcomes": 2} | limits
    return drafter.draft_ahead([AheadRequest(verifying, **bounds)])[0]


def test_early_trees_are_those_drafted_once_the_outcome_is_known(small: Path, target: Target) -> None:
    drafter = make(small, TreeShape(3, 2, 6))
    game = Game(drafter, target)
    (opened,) = game.open(PROMPTS[2])
    (draft,) = game.draft()
    early = ahead(drafter, opened, draft)
    assert len(early) == 2
    assert len({tuple(found.assumed) for found in early}) == 2
    own = Target(small, FeatureSpec())
    paths = [found.assumed[:-1].tolist() for found in early]
    for place, found in enumerate(early):
        # The assumed path is one of the tree's, and then a token that it does not offer there.
        node = -1
        for token in found.assumed[:-1].tolist():
            child = draft.tree.child(node, token)
            assert child is not None
            node = child
        bonus = int(found.assumed[-1])
        offered = {int(draft.tokens[child]) for child in draft.tree.children(node)}
        text = opened.tokens.tolist() + found.assumed[:-1].tolist()
        logits = own.run(text)[0][-1]
        guesses = [t for t in logits.argsort(descending=True).tolist() if t not in offered]
        assert bonus == guesses[paths[:place].count(paths[place])]
        assert_same_tree(found, grown(chances(own, [*text, bonus]), 3, 2, 5))
    drafter.close([opened])
    assert_empty(drafter)


def test_early_drafts_for_a_perfect_drafter_come_true(folder: Path, target: Target) -> None:
    drafter = make(folder)
    game = Game(drafter, target)
    (opened,) = game.open(PROMPTS[0])
    (draft,) = game.draft()
    confident = replace(draft, probabilities=np.array([0.9, 0.8, 0.7]))
    found = ahead(drafter, opened, confident, max_outcomes=4)
    drafter.extend([game.commit(opened, game.accepted(opened, draft))])
    (now,) = game.draft()
    true = [early for early in found if early.assumed.tolist() == opened.tokens[-4:].tolist()]
    assert len(true) == 1
    assert true[0].tokens.tolist() == now.tokens.tolist()


@pytest.mark.parametrize("shape", [CHAIN, TreeShape(3, 2, 6)])
def test_what_was_committed_last_is_run_with_the_likeliest_path(folder: Path, target: Target, shape: TreeShape) -> None:
    """Early trees below an early tree, right after the verdict, are those of a drafter that has caught up before."""
    drafter, calm = make(folder, shape), make(folder, shape)
    drafts: list[list[Draft]] = []
    for one, caught_up in ((drafter, False), (calm, True)):
        game = Game(one, target)
        (opened,) = game.open(PROMPTS[0])
        (draft,) = game.draft()
        one.extend([game.commit(opened, game.accepted(opened, draft))])
        if caught_up:
            game.draft()
        tree = TokenTree.chain(np.array([3, 4, 5], np.int32))
        verifying = InVerification(opened, tree, np.array([0.9, 0.8, 0.5]))
        drafts.append(one.draft_ahead([AheadRequest(verifying, 5, 8, 2)])[0])
        (after,) = game.draft()
        drafts[-1].append(after)
        one.close([opened])
        assert_empty(one)
    for early, late in zip(*drafts, strict=True):
        assert early.assumed.tolist() == late.assumed.tolist()
        assert_same_tree(early, model_rig.nodes(late))


def test_bounds_of_early_drafts(folder: Path, target: Target) -> None:
    drafter = make(folder)
    game = Game(drafter, target)
    (opened,) = game.open(PROMPTS[0])
    (draft,) = game.draft()
    assert all(len(found.assumed) == 1 for found in ahead(drafter, opened, draft, max_assumed=1))
    assert len(ahead(drafter, opened, draft, max_outcomes=1)) == 1
    assert all(len(found) <= 2 for found in ahead(drafter, opened, draft, num_nodes=2))
    opened.remaining = 2
    assert [len(found.assumed) for found in ahead(drafter, opened, draft)] == []
    unknown = session([4, 4])
    assert ahead(drafter, unknown, Draft()) == []
    empty = InVerification(opened, TokenTree.empty(), np.empty(0))
    opened.remaining = 50
    found, other = drafter.draft_ahead([AheadRequest(empty, 3, 4, 2)])[0]
    assert found.assumed.tolist() == [target.next(opened.tokens.tolist())]
    assert len(other.assumed) == 1 != len({*found.assumed.tolist(), *other.assumed.tolist()})


def test_early_drafts_stop_where_there_is_no_room(folder: Path, target: Target) -> None:
    drafter = make(folder, num_slots=11)
    game = Game(drafter, target)
    (opened,) = game.open(PROMPTS[0])
    (draft,) = game.draft()
    found = ahead(drafter, opened, draft, max_outcomes=16)
    assert 0 < len(found) < 16
    assert drafter.take_given_up() == []
    drafter.close([opened])
    drafter.model.cache.check([])
    crowded = make(folder, table_rows=1)
    game = Game(crowded, target)
    (opened,) = game.open(PROMPTS[0])
    assert ahead(crowded, opened, game.draft()[0]) == []


# ---- Without a session


@pytest.mark.asyncio
async def test_propose_leaves_no_trace(folder: Path, target: Target) -> None:
    drafter = make(folder)
    text = np.array(PROMPTS[2], np.int32)
    draft = await drafter.propose(TextRequest(text))
    assert len(draft) == 3
    assert draft.tokens[0] == target.next(PROMPTS[2])
    wide = await drafter.propose(TextRequest(text, wishes=Wishes(num_steps=2, topk=3, num_draft_tokens=8)))
    assert len(wide) == 7
    assert_empty(drafter)
    with pytest.raises(InvalidArgument, match="token 96 is outside"):
        await drafter.propose(TextRequest(np.array([96], np.int32)))
    with pytest.raises(ResourceExhausted, match="201 rows; the draft model's context has 200"):
        await drafter.propose(TextRequest(np.ones(201, np.int32)))
    assert_empty(drafter)
    assert drafter.take_given_up() == []
    drafter.close_down()


@pytest.mark.asyncio
async def test_who_takes_sessions_that_were_given_up_takes_no_text(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, taken = make(folder), list[GivenUp]()
    served, forget = drafter._served, drafter._served.forget

    def taking(session: Session) -> None:
        taken.extend(drafter.take_given_up())  # as the event loop does after any visit
        forget(session)

    monkeypatch.setattr(served, "forget", taking)
    with pytest.raises(ResourceExhausted):
        await drafter.propose(TextRequest(np.ones(201, np.int32)))
    assert taken == []
    assert served._refused == {}


@pytest.mark.asyncio
async def test_a_proposal_that_nobody_waits_for_ends_before_the_next_step(
    folder: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make(folder)
    reached, left = asyncio.Event(), threading.Event()
    loop, run = asyncio.get_running_loop(), drafter.model.run
    calls: list[int] = []

    def held(*arguments: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 3:  # the text, and two steps
            loop.call_soon_threadsafe(reached.set)
            left.wait()
        return run(*arguments)

    monkeypatch.setattr(drafter.model, "run", held)
    wishes = Wishes(num_steps=20, topk=1, num_draft_tokens=21)
    asked = asyncio.create_task(drafter.propose(TextRequest(np.array(PROMPTS[2], np.int32), wishes=wishes)))
    await reached.wait()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    left.set()
    with drafter._lock:  # the one that was under way has it until it ends
        assert len(calls) == 3
    assert_empty(drafter)
    monkeypatch.undo()
    again = await drafter.propose(TextRequest(np.array(PROMPTS[2], np.int32)))
    assert again.tokens[0] == target.next(PROMPTS[2])


# ---- From flags


def args(**flags: Any) -> DraftArgs:
    settings: dict[str, Any] = {
        "speculative_algorithm": "STANDALONE", "dtype": "float32", "device": "cpu", "draft_max_total_tokens": NUM_SLOTS,
        "max_sessions": 4,
    }  # fmt: skip
    return DraftArgs(**(settings | flags))


def test_from_flags(folder: Path, target: Target, tmp_path: Path) -> None:
    save_file({"token_map": torch.arange(90)}, tmp_path / "map.safetensors")
    drafter = factory.make_drafter(
        args(speculative_draft_model_path=str(folder), speculative_token_map=str(tmp_path / "map.safetensors"))
    )
    assert isinstance(drafter, StandaloneDrafter)
    assert drafter.algorithm == common_pb2.ALGORITHM_STANDALONE
    assert drafter.features.kind == common_pb2.FEATURE_KIND_NONE
    assert drafter.num_draft_tokens == 4
    assert drafter.draft_model == str(folder)
    assert not drafter.inline
    game = Game(drafter, target)
    game.open(PROMPTS[0])
    assert len(game.draft()[0]) == 3


def test_a_target_for_which_none_is_shipped_needs_a_draft_model(folder: Path) -> None:
    with pytest.raises(StartupError, match="give --speculative-draft-model-path"):
        standalone.make_drafter(args(model_path=str(folder)))


def test_a_pool_that_no_memory_holds_is_refused(folder: Path) -> None:
    with pytest.raises(StartupError, match=r"--draft-max-total-tokens is 2147483647, of .* fit into"):
        standalone.make_drafter(args(speculative_draft_model_path=str(folder), draft_max_total_tokens=2**31 - 1))


def test_graphs_that_cannot_be_are_refused(folder: Path) -> None:
    with pytest.raises(StartupError, match=r"--cuda-graph-max-bs is given, but .* the device is cpu"):
        standalone.make_drafter(args(speculative_draft_model_path=str(folder), device="cpu", cuda_graph_max_bs=4))


def tokenizer(folder: Path, words: list[str]) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])).save(
        str(folder / "tokenizer.json")
    )


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    for name in ("draft", "target"):
        save_model("llama", tmp_path / name)
        tokenizer(tmp_path / name, ["a", "b"])
    own = str(tmp_path / "draft")
    drafter = standalone.make_drafter(args(speculative_draft_model_path=own, model_path=str(tmp_path / "target")))
    assert len(drafter.target.vocab_fingerprint) == 64
    tokenizer(tmp_path / "target", ["a", "c"])
    with pytest.raises(StartupError, match="have different vocabularies"):
        standalone.make_drafter(args(speculative_draft_model_path=own, model_path=str(tmp_path / "target")))


@pytest.mark.parametrize("shape", [TreeShape(4, 1, 5), TreeShape(4, 2, 6)])
def test_a_verdict_ends_drafting_ahead_between_two_steps(folder: Path, target: Target, shape: TreeShape) -> None:
    drafter = make(folder, shape)
    (opened,) = Game(drafter, target).open(PROMPTS[0])
    (draft,) = drafter.draft([DraftRequest(opened, 5)])
    verifying = InVerification(opened, draft.tree, draft.probabilities)
    rows = drafter.model.cache.num_free
    steps: list[int] = []
    model: Any = drafter.model
    run = model.run

    def counted(segments: Any, *more: Any) -> Tips:
        steps.append(len(segments))
        return run(segments, *more)

    model.run = counted

    def verdict_after(count: int, left: bool) -> list[Draft]:
        """Drafts ahead; a verdict comes while step number `count` runs."""
        steps.clear()
        request = AheadRequest(verifying, 5, 8, 1, left=lambda assumed: left and len(steps) >= count)
        return drafter.draft_ahead([request])[0]

    assert len(verdict_after(0, left=False)) == 1
    most = len(steps)
    for count in range(most):
        assert verdict_after(count, left=True) == []
        assert len(steps) == count  # nothing was run after it
        assert drafter.model.cache.num_free == rows
    assert drafter.draft([DraftRequest(opened, 5)])[0].tokens.tolist() == draft.tokens.tolist()
