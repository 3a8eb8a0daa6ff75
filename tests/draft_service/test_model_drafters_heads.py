"""Drafters with a head: trees against the equations, features in any order, and the pairing of rows and features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draft_service import planners
from draft_service.drafters import factory, heads
from draft_service.drafters.base import AheadRequest, Draft, DraftRequest, TextRequest
from draft_service.drafters.eagle import EagleDrafter, HeadDrafter
from draft_service.drafters.models import HeadModel
from draft_service.drafters.mtp import MultiLayerDrafter
from draft_service.drafters.shape import TreeShape
from draft_service.drafting import Drafting
from draft_service.overlap import FixedOverlap
from draft_service.planning import CostPlanner, FixedPlanner
from draft_service.rehearsal import rehearse
from draft_service.session import Grown, Session, Wishes
from draft_service.sessions import InVerification, SessionTable
from engine.feature_spec import FeatureSpec
from engine.models.heads.load import load_head
from engine.models.heads.runner import HeadRunner
from outrider.args import DraftArgs
from outrider.errors import InvalidArgument, ResourceExhausted, StartupError
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import pack_ids, unpack_ids
from tests.draft_service.model_rig import Game, Probabilities, Target, assert_same_tree, grown, rows, session
from tests.draft_service.sending import sent
from tests.engine.heads import make, reference
from tests.engine.heads.make import Written
from tests.engine.heads.reference import MultiLayer, Reference

NUM_SLOTS = 900
PROMPTS = [[5, 9, 33], [70, 2], list(range(1, 12)), [79, 4], [8, 8, 8], [17, 40], [2, 60, 61], [55] * 20]
TREE = TreeShape(4, 3, 9)


@dataclass
class Side:
    """A head and its target on disk, the target running, and the head's equations."""

    folder: Path
    target_folder: Path
    target: Target
    reference: Reference

    def drafter(
        self, shape: TreeShape = TREE, *, num_slots: int = NUM_SLOTS, max_len: int = 128, table_rows: int = 24,
        **options: Any,
    ) -> HeadDrafter[Any]:  # fmt: skip
        head, _ = load_head(self.folder, self.target_folder, max_len=max_len, **options)
        runner = HeadRunner(head, num_slots=num_slots, max_sessions=table_rows)
        model = HeadModel(runner, num_slots, max_batch_tokens=256)
        kind = MultiLayerDrafter if head.config.family == "multi-layer" else EagleDrafter
        return kind(
            model, shape, algorithm=common_pb2.ALGORITHM_EAGLE, draft_model="tiny",
            features=common_pb2.FeatureLayout(width=model.feature_width), target=common_pb2.ModelInfo(),
        )  # fmt: skip

    def chances(self, text: list[int], assumed: list[int] | None = None) -> Probabilities:
        """What the head expects after `text` (whose features are the target's) and `assumed` (whose are its own)."""
        features = self.target.run(text)[1][:-1]

        def after(path: list[int]) -> dict[int, float]:
            logits = self.reference.next_logits(text, features, [*(assumed or []), *path])[-1]
            return {self.reference.token(i): p for i, p in enumerate(logits.softmax(-1).tolist())}

        return after


Make = Callable[[Path, Written], tuple[Written, type[Reference]]]
FAMILIES: dict[str, Make] = {
    "eagle": lambda f, t: (make.eagle(f), reference.Eagle),
    "eagle3": lambda f, t: (make.eagle3(f), reference.Eagle3),
    "eagle3-norm-output": lambda f, t: (make.eagle3(f, norm_output=True, fc_norm=True), reference.Eagle3),
    "nextn": lambda f, t: (make.add_nextn(t), reference.NextN),
    "mimo": lambda f, t: (make.add_mimo(t), reference.Mimo),
    "multi-layer": lambda f, t: (make.add_multi_layer(t), reference.MultiLayer),
}
GROWING = [name for name in FAMILIES if name != "multi-layer"]


def make_side(name: str, folder: Path) -> Side:
    plain = make.write_target(folder / "target")
    running = Target(plain.folder, load_spec(name))
    written, kind = FAMILIES[name](folder / "head", plain)
    return Side(written.folder, plain.folder, running, kind(written, plain))


def load_spec(name: str) -> FeatureSpec:
    if name.startswith("eagle3"):
        return FeatureSpec("aux", (2, 4, 5))
    return FeatureSpec("aux", (make.LAYERS,)) if name == "multi-layer" else FeatureSpec("last")


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Side]:
    return {name: make_side(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


@pytest.fixture(params=GROWING)
def side(request: pytest.FixtureRequest, sides: dict[str, Side]) -> Side:
    return sides[request.param]


@pytest.fixture(params=list(FAMILIES))
def any_side(request: pytest.FixtureRequest, sides: dict[str, Side]) -> Side:
    return sides[request.param]


@pytest.fixture
def eagle3(sides: dict[str, Side]) -> Side:
    return sides["eagle3"]


def assert_empty(drafter: HeadDrafter[Any]) -> None:
    drafter.model.cache.check([])
    assert drafter.model.cache.num_free == NUM_SLOTS


@pytest.mark.parametrize("shape", [TreeShape(1, 1, 2), TreeShape(4, 1, 5), TreeShape(3, 2, 6), TREE])
def test_trees_follow_the_equations_round_by_round(side: Side, shape: TreeShape) -> None:
    drafter = side.drafter(shape)
    game = Game(drafter, side.target)
    game.open(*PROMPTS[:3])
    for _ in range(3):
        for opened, draft in zip(game.sessions, game.draft(), strict=True):
            expected = grown(
                side.chances(opened.tokens.tolist()), shape.num_steps, shape.topk, shape.num_draft_tokens - 1
            )
            assert_same_tree(draft, expected, 1e-3)
        game.round()
    drafter.close(game.sessions)
    assert_empty(drafter)


def test_multi_layer_chains_follow_the_equations_round_by_round(sides: dict[str, Side]) -> None:
    side = sides["multi-layer"]
    drafter = side.drafter(TreeShape(3, 1, 4))
    game = Game(drafter, side.target)
    game.open(*PROMPTS, [6])  # of the last, rows of later stages are of drafts alone
    assert isinstance(side.reference, MultiLayer)
    for num_accepted in (0, 2, 1, 3, 0):
        for opened, draft in zip(game.sessions, game.draft(), strict=True):
            text = opened.tokens.tolist()
            assert draft.tokens.tolist() == side.reference.chain(text, side.target.run(text)[1][:-1], 3)
            assert draft.parents.tolist() == [-1, 0, 1]
            assert (np.diff(draft.probabilities) <= 0).all()
        # Whatever was drafted, what is committed is the target's.
        for opened in game.sessions:
            text = opened.tokens.tolist()
            accepted: list[int] = []
            while len(accepted) < num_accepted:
                accepted.append(side.target.next(text + accepted))
            drafter.extend([game.commit(opened, accepted)])
    drafter.close(game.sessions)
    assert_empty(drafter)


def contents(drafter: HeadDrafter[Any], opened: Session) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a session's rows, in order of position."""
    (found,) = [state.rows for state in drafter._served if state.session is opened]
    runner: HeadRunner = drafter._head._runner
    slots = drafter.model.cache.slot_table[found.table_row, : found.num_rows].astype(np.int64)
    return runner.pool.k[:, slots], runner.pool.v[:, slots]


def test_extending_verdict_by_verdict_equals_drafting_from_scratch(any_side: Side) -> None:
    shape = TreeShape(3, 1, 4) if any_side.folder == any_side.target_folder else TREE
    drafter, fresh = any_side.drafter(shape), any_side.drafter(shape)
    game = Game(drafter, any_side.target)
    game.open(*PROMPTS[:4])
    for _ in range(6):
        game.round()
        game.draft()
    again = [session(opened.tokens.tolist(), prompt_len=opened.prompt_len) for opened in game.sessions]
    fresh.open(again)
    fresh.add_features([(s, rows(0, game.features(s)[:-1])) for s in again])
    before = fresh.draft([DraftRequest(s, 8) for s in again])
    for opened, other, now, then in zip(game.sessions, again, game.draft(8), before, strict=True):
        for own, theirs in zip(contents(drafter, opened), contents(fresh, other), strict=True):
            torch.testing.assert_close(own, theirs, atol=1e-4, rtol=1e-4)
        assert now.tokens.tolist() == then.tokens.tolist()
        assert now.parents.tolist() == then.parents.tolist()
        np.testing.assert_allclose(now.probabilities, then.probabilities, atol=1e-4)


def test_sessions_drafted_together_get_what_they_get_alone(any_side: Side) -> None:
    together = Game(any_side.drafter(), any_side.target)
    together.open(*PROMPTS)
    together.round()
    for prompt, draft in zip(PROMPTS, together.draft(), strict=True):
        alone = Game(any_side.drafter(), any_side.target)
        alone.open(prompt)
        alone.round()
        (own,) = alone.draft()
        assert draft.tokens.tolist() == own.tokens.tolist()
        assert draft.parents.tolist() == own.parents.tolist()


def test_output_is_the_targets_whatever_the_head_says(any_side: Side) -> None:
    game = Game(any_side.drafter(), any_side.target)
    game.open(*PROMPTS[:4])
    for _ in range(4):
        game.round()
    for opened, prompt in zip(game.sessions, PROMPTS, strict=False):
        text = list(prompt)
        while len(text) < len(opened.tokens):
            text.append(any_side.target.next(text))
        assert opened.tokens.tolist() == text


# ---- Features


def test_a_session_is_drafted_for_only_when_every_row_has_come(any_side: Side) -> None:
    drafter = any_side.drafter()
    opened = session([3, 4, 5, 6, 7, 8])
    features = any_side.target.run(opened.tokens.tolist())[1]
    drafter.open([opened])
    request = [DraftRequest(opened, 3)]
    assert len(drafter.draft(request)[0]) == 0
    drafter.add_features([(opened, rows(3, features[3:5]))])
    assert len(drafter.draft(request)[0]) == 0
    drafter.add_features([(opened, common_pb2.FeatureRows(first_pos=0, count=3, announced=True))])
    assert len(drafter.draft(request)[0]) == 0
    drafter.add_features([(opened, rows(0, features[:2]))])
    assert len(drafter.draft(request)[0]) == 0
    # The last gap, with a row that is known already.
    drafter.add_features([(opened, rows(1, features[1:3]))])
    (draft,) = drafter.draft(request)
    other = Game(any_side.drafter(), any_side.target)
    same = session(opened.tokens.tolist())
    other.drafter.open([same])
    other.drafter.add_features([(same, rows(0, features[:5]))])
    assert draft.tokens.tolist() == other.drafter.draft([DraftRequest(same, 3)])[0].tokens.tolist()
    assert len(draft) == 3


def test_a_verdict_without_its_rows_waits_for_them(any_side: Side) -> None:
    drafter = any_side.drafter()
    game = Game(drafter, any_side.target)
    (opened,) = game.open(PROMPTS[2])
    told = [game.commit(opened, []) for _ in range(2)]
    late = told[0].verdict.features
    kept = common_pb2.FeatureRows.FromString(late.SerializeToString())
    late.Clear()
    late.announced = True
    drafter.extend(told)
    assert len(game.draft()[0]) == 0
    drafter.add_features([(opened, kept)])
    (draft,) = game.draft()
    again = Game(any_side.drafter(), any_side.target)
    again.open(PROMPTS[2])
    again.drafter.extend([again.commit(again.sessions[0], []) for _ in range(2)])
    assert draft.tokens.tolist() == again.draft()[0].tokens.tolist()


def test_bf16_rows_are_taken(eagle3: Side) -> None:
    drafter = eagle3.drafter()
    opened = session(PROMPTS[2])
    drafter.open([opened])
    features = eagle3.target.run(PROMPTS[2])[1][:-1].bfloat16()
    drafter.add_features([(opened, rows(0, features[:4])), (opened, rows(4, features[4:]))])
    assert len(drafter.draft([DraftRequest(opened, 8)])[0]) == 8


def spoilt(kind: str, features: torch.Tensor) -> common_pb2.FeatureRows:
    found = rows(0, features)
    if kind == "NaN":
        return rows(0, features.clone().index_fill(0, torch.tensor([1]), torch.nan))
    if kind == "infinity":
        return rows(0, features.clone().index_fill(0, torch.tensor([1]), torch.inf))
    if kind == "width":
        return rows(0, features[:, :-1])
    if kind == "count":
        found.count += 1
    if kind == "dtype":
        found.rows.dtype = common_pb2.DTYPE_UNSPECIFIED
    if kind == "bytes":
        found.rows.data = found.rows.data[:-4]
    if kind == "shape":
        found.rows.shape[:] = [features.numel()]
    return found


@pytest.mark.parametrize("kind", ["NaN", "infinity", "width", "count", "dtype", "bytes", "shape"])
def test_unusable_rows_cost_their_session_and_no_other(kind: str, eagle3: Side) -> None:
    drafter = eagle3.drafter()
    bad, good = session([3, 4, 5, 6]), session([3, 4, 5, 6])
    features = eagle3.target.run([3, 4, 5, 6])[1][:-1]
    drafter.open([bad, good])
    drafter.add_features([(bad, spoilt(kind, features)), (good, rows(0, features))])
    assert [len(d) for d in drafter.draft([DraftRequest(bad, 8), DraftRequest(good, 8)])] == [0, 8]
    (given,) = drafter.take_given_up()
    assert given.session is bad
    assert given.reason == verify_pb2.RELEASE_REASON_FEATURES
    drafter.add_features([(bad, rows(0, features))])
    drafter.close([bad, good])
    assert_empty(drafter)


def test_long_prompts_are_run_as_their_rows_come(any_side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("session_drafter", "mtp"):
        monkeypatch.setattr(f"draft_service.drafters.{name}.MAX_ROWS_PER_CALL", 16)
    drafter = any_side.drafter()
    prompt = [(7 * i) % 80 for i in range(60)]
    opened = session(prompt)
    features = any_side.target.run(prompt)[1]
    drafter.open([opened])
    for first in range(0, 59, 20):
        drafter.add_features([(opened, rows(first, features[first : min(59, first + 20)]))])
    drafts = [drafter.draft([DraftRequest(opened, 3)])[0] for _ in range(4)]
    assert [len(draft) > 0 for draft in drafts] == sorted(len(draft) > 0 for draft in drafts)
    fresh = any_side.drafter()
    monkeypatch.undo()
    same = session(prompt)
    fresh.open([same])
    fresh.add_features([(same, rows(0, features[:-1]))])
    assert drafts[-1].tokens.tolist() == fresh.draft([DraftRequest(same, 3)])[0].tokens.tolist()


# ---- Ahead


@pytest.mark.parametrize("with_memo", [True, False])
def test_early_trees_go_on_from_the_heads_own_states(side: Side, with_memo: bool) -> None:
    drafter = side.drafter(TreeShape(3, 2, 6))
    game = Game(drafter, side.target)
    (opened,) = game.open(PROMPTS[2])
    (draft,) = game.draft()
    text = opened.tokens.tolist()
    memo = draft.memo if with_memo else None  # what came out of the tree's rows saves running them one after another
    request = AheadRequest(InVerification.whole(opened, draft.tree, draft.probabilities, memo), 5, 8, 3)
    (early,) = drafter.draft_ahead([request])
    assert len(early) == 3
    paths = [found.assumed[:-1].tolist() for found in early]
    for place, found in enumerate(early):
        assumed = found.assumed.tolist()
        node = -1
        for token in assumed[:-1]:
            child = draft.tree.child(node, token)
            assert child is not None
            node = child
        offered = {int(draft.tokens[child]) for child in draft.tree.children(node)}
        after = side.chances(text)(assumed[:-1])
        guesses = sorted((t for t in after if t not in offered), key=lambda t: -after[t])
        assert assumed[-1] == guesses[paths[:place].count(assumed[:-1])]
        assert_same_tree(found, grown(side.chances(text, assumed), 3, 2, 5), 1e-3)
    # What was guessed leaves no trace in the rows that stay.
    assert game.draft()[0].tokens.tolist() == draft.tokens.tolist()
    drafter.close([opened])
    assert_empty(drafter)


def test_drafts_end_early_where_that_is_wanted_and_no_request_says_otherwise(side: Side) -> None:
    drafter = side.drafter(TreeShape(3, 2, 6))
    game = Game(drafter, side.target)
    (opened,) = game.open(PROMPTS[2])
    (whole,) = game.draft()
    assert whole.grown == Grown(2, 3)
    drafter.reshape(TreeShape(3, 2, 6), 2.0)
    (draft,) = game.draft()
    assert draft.grown == Grown(2, 1, cut_short=True)
    assert draft.parents.tolist() == [-1, -1]
    verifying = InVerification.whole(opened, whole.tree, whole.probabilities, whole.memo)
    (early,) = drafter.draft_ahead([AheadRequest(verifying, 5, 8, 3)])
    assert [found.grown for found in early] == [Grown(2, 1, cut_short=True)] * len(early) != []
    opened.wishes = Wishes(num_steps=3)
    assert [draft.tokens.tolist() for draft in game.draft()] == [whole.tokens.tolist()]


def test_multi_layer_heads_draft_nothing_ahead(sides: dict[str, Side]) -> None:
    drafter = sides["multi-layer"].drafter(TreeShape(3, 1, 4))
    game = Game(drafter, sides["multi-layer"].target)
    (opened,) = game.open(PROMPTS[2])
    (draft,) = game.draft()
    verifying = InVerification(opened, draft.tree, draft.probabilities)
    assert drafter.draft_ahead([AheadRequest(verifying, 5, 8, 3)]) == [[]]


# ---- Bounds


def test_wishes_limits_and_room(any_side: Side) -> None:
    drafter = any_side.drafter(TreeShape(3, 1, 4), max_len=32)
    game = Game(drafter, any_side.target)
    (opened,) = game.open(PROMPTS[2])
    assert [len(draft) for draft in game.draft(2)] == [2]
    assert [len(draft) for draft in game.draft(0)] == [0]
    opened.remaining = 2
    assert [len(draft) for draft in game.draft()] == [1]
    opened.remaining, opened.wishes = 1000, Wishes(num_steps=2)
    assert [len(draft) for draft in game.draft()] == [2]
    while len(opened.tokens) < 34:
        drafter.extend([game.commit(opened, [])])
    assert [len(draft) for draft in game.draft()] == [0]
    (given,) = drafter.take_given_up()
    assert "the draft model's context has 32" in given.detail


def test_pages_run_out_for_the_session_that_needs_them(any_side: Side) -> None:
    drafter = any_side.drafter(TreeShape(3, 1, 4), num_slots=40)
    game = Game(drafter, any_side.target)
    small, _large = game.open([5, 6], [(3 * i) % 80 for i in range(45)])
    assert [len(draft) for draft in game.draft()] == [3, 0]
    (given,) = drafter.take_given_up()
    assert given.reason == verify_pb2.RELEASE_REASON_CAPACITY
    drafter.close(game.sessions)
    drafter.model.cache.check([])
    assert small not in drafter._served


# ---- Without a session


def tensor(values: torch.Tensor) -> common_pb2.Tensor:
    return rows(0, values).rows


@pytest.mark.asyncio
async def test_propose_needs_features_and_leaves_no_trace(any_side: Side) -> None:
    drafter = any_side.drafter(TreeShape(3, 1, 4))
    text = np.array(PROMPTS[2], np.int32)
    features = any_side.target.run(PROMPTS[2])[1]
    with pytest.raises(InvalidArgument, match="drafts from the target's hidden states"):
        await drafter.propose(TextRequest(text))
    found = await drafter.propose(TextRequest(text, features=tensor(features[:-1])))
    opened = session(PROMPTS[2])
    drafter.open([opened])
    drafter.add_features([(opened, rows(0, features[:-1]))])
    assert found.tokens.tolist() == drafter.draft([DraftRequest(opened, 3)])[0].tokens.tolist()
    drafter.close([opened])
    with pytest.raises(InvalidArgument, match="11 rows for 11 tokens"):
        await drafter.propose(TextRequest(text, features=tensor(features)))
    with pytest.raises(InvalidArgument, match="numbers a row are needed"):
        await drafter.propose(TextRequest(text, features=tensor(features[:-1, :-1])))
    with pytest.raises(InvalidArgument, match=r"tokens has 1 token; .* drafts from 2 or more"):
        await drafter.propose(TextRequest(text[:1]))
    with pytest.raises(InvalidArgument, match="token 80 is outside"):
        await drafter.propose(TextRequest(np.array([80, 1], np.int32), features=tensor(features[:1])))
    long = torch.zeros(200, features.shape[1])
    with pytest.raises(ResourceExhausted, match="context has 128"):
        await drafter.propose(TextRequest(np.ones(201, np.int32), features=tensor(long)))
    assert_empty(drafter)
    assert drafter.take_given_up() == []


# ---- From flags


def args(side: Side, **flags: Any) -> DraftArgs:
    settings: dict[str, Any] = {
        "speculative_algorithm": "EAGLE", "dtype": "float32", "device": "cpu", "draft_max_total_tokens": NUM_SLOTS,
        "max_sessions": 4, "model_path": str(side.target_folder), "speculative_draft_model_path": str(side.folder),
    }  # fmt: skip
    return DraftArgs(**(settings | flags))


@pytest.mark.parametrize(
    ("name", "flag", "algorithm", "num_draft_tokens"),
    [
        ("eagle", "EAGLE", common_pb2.ALGORITHM_EAGLE, 8),
        ("eagle", "nextn", common_pb2.ALGORITHM_EAGLE, 8),
        ("eagle3", "EAGLE3", common_pb2.ALGORITHM_EAGLE3, 8),
        ("nextn", "NEXTN", common_pb2.ALGORITHM_MTP, 8),
        ("mimo", "EAGLE", common_pb2.ALGORITHM_MTP, 4),
        ("multi-layer", "EAGLE", common_pb2.ALGORITHM_MTP, 4),
    ],
)
def test_from_flags(
    name: str, flag: str, algorithm: common_pb2.Algorithm, num_draft_tokens: int, sides: dict[str, Side]
) -> None:
    side = sides[name]
    own = name in {"nextn", "mimo", "multi-layer"}
    more = {"speculative_draft_model_path": None} if own else {}
    drafter = factory.make_drafter(args(side, speculative_algorithm=flag, **more))
    assert isinstance(drafter, HeadDrafter)
    assert drafter.algorithm == algorithm
    assert drafter.num_draft_tokens == num_draft_tokens
    spec = load_spec(name)
    kinds = {"last": common_pb2.FEATURE_KIND_LAST, "aux": common_pb2.FEATURE_KIND_AUX}
    assert drafter.features.kind == kinds[spec.kind]
    assert tuple(drafter.features.aux_layers) == spec.layers
    assert drafter.features.width == side.target.run([1])[1].shape[1]
    assert (drafter.target.hidden_size, drafter.target.vocab_size) == (make.HIDDEN, make.VOCAB)
    game = Game(drafter, side.target)
    game.open(PROMPTS[0])
    assert len(game.draft()[0]) == num_draft_tokens - 1


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("eagle3", {}, "EAGLE, but the head in .* is of family eagle3: use EAGLE3"),
        ("eagle", {"speculative_algorithm": "EAGLE3"}, "EAGLE3, but .* of family eagle: use EAGLE"),
        ("eagle", {"speculative_draft_model_path": None}, "the target has no head of its own"),
        ("eagle", {"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle needs a layer for each step"),
        ("eagle", {"speculative_draft_attention_backend": "fa3"}, "is SGLang's and not offered here"),
        ("eagle", {"speculative_token_map": "/none.pt"}, "token map /none.pt does not exist"),
        (
            "multi-layer",
            {"speculative_num_steps": 4, "speculative_eagle_topk": 1},
            "multi-layer head of 3 layers drafts chains",
        ),
        ("multi-layer", {"speculative_adaptive": True}, "--speculative-adaptive needs a head with one layer"),
        ("eagle3", {"draft_max_total_tokens": 2**31 - 1}, "--draft-max-total-tokens is 2147483647, of .* fit into"),
    ],
)
def test_flags_that_do_not_fit_the_head(name: str, flags: dict[str, Any], words: str, sides: dict[str, Side]) -> None:
    with pytest.raises(StartupError, match=words):
        factory.make_drafter(args(sides[name], **flags))


def test_a_targets_own_head_that_is_damaged_is_not_called_absent(tmp_path: Path) -> None:
    damaged = make.rewrite(make.add_nextn(make.write_target(tmp_path)), drop=("model.layers.8.enorm.weight",))
    flags = DraftArgs(speculative_algorithm="NEXTN", model_path=str(damaged.folder), device="cpu")
    with pytest.raises(StartupError, match=f"^{tmp_path}: 1 tensors of the nextn head are missing: model.layers.8.eno"):
        factory.make_drafter(flags)


def test_a_multi_layer_heads_trees_are_refused_before_it_is_loaded(sides: dict[str, Side]) -> None:
    for tree in ((4, 1, 5), (2, 2, 4)):
        names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        with pytest.raises(StartupError, match="multi-layer head of 3 layers drafts chains"):
            factory.describe_drafter(args(sides["multi-layer"], **dict(zip(names, tree, strict=True))))


@pytest.mark.parametrize(("name", "deepest"), [("eagle3", 7), ("nextn", 7), ("mimo", 7), ("multi-layer", 3)])
def test_a_head_with_one_layer_is_planned_as_deep_as_any(
    name: str, deepest: int, sides: dict[str, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[TreeShape] = []

    class Noting(CostPlanner):
        def __init__(self, first: TreeShape, most: TreeShape, *more: Any) -> None:
            planned.append(most)
            super().__init__(first, most, *more)

    prepared: list[int] = []

    def sizes(args: DraftArgs, steps: Sequence[int], topk: int, *, is_quantized: bool) -> None:
        prepared.extend(steps)

    monkeypatch.setattr(planners, "CostPlanner", Noting)
    monkeypatch.setattr(heads, "tree_sizes", sizes)
    side = sides[name]
    flags = args(side, speculative_algorithm="EAGLE3" if name == "eagle3" else "EAGLE")
    planners.make_planner(flags, factory.make_drafter(flags))
    assert [most.num_steps for most in planned if most is not None] == [deepest]
    assert max(prepared) == deepest


def test_a_multi_layer_head_may_draft_less_than_it_can(sides: dict[str, Side]) -> None:
    side = sides["multi-layer"]
    flags = {"speculative_num_steps": 2, "speculative_eagle_topk": 1, "enable_multi_layer_eagle": True}
    drafter = factory.make_drafter(args(side, **flags))
    assert isinstance(drafter, MultiLayerDrafter)
    game = Game(drafter, side.target)
    game.open(PROMPTS[0])
    assert [len(draft) for draft in game.draft(8)] == [2]


def test_random_weights_of_a_head_and_its_target(eagle3: Side) -> None:
    drafter = factory.make_drafter(
        args(eagle3, speculative_algorithm="EAGLE3", speculative_draft_load_format="dummy", load_format="dummy")
    )
    assert drafter.num_draft_tokens == 8


# ---- Through the stream's state machine


@pytest.mark.asyncio
async def test_rounds_in_proposals_out(eagle3: Side) -> None:
    drafter = eagle3.drafter(TreeShape(3, 2, 6))
    prompt = PROMPTS[2]
    bonus = eagle3.target.next(prompt)
    features = eagle3.target.run(prompt)[1]
    limits = verify_pb2.DrafterLimits(max_assumed_tokens=8, max_proposals_per_session=4)
    table = SessionTable(verify_pb2.Enlisted(limits=limits), max_sessions=4)
    opened = verify_pb2.Opened(
        session=7, generation=1, tokens=pack_ids(prompt), prompt_len=len(prompt), remaining_tokens=50,
        remaining_context=50,
    )  # fmt: skip
    told = verify_pb2.SessionFeatures(session=7, generation=1, rows=rows(0, features[:-1]))
    verdict = verify_pb2.Verdict(
        session=7, generation=1, base_len=len(prompt), tokens=[bonus], features=rows(len(prompt) - 1, features[-1:]),
        next=verify_pb2.Next(kind=verify_pb2.NEXT_KIND_WAITING, base_len=len(prompt) + 1),
    )  # fmt: skip
    with ThreadPoolExecutor(1) as executor:
        drafting = Drafting(drafter, FixedPlanner(FixedOverlap(on=True)), executor=executor)
        round = verify_pb2.Round(opened=[opened], features=[told], verdicts=[verdict])
        frames = await sent(drafting, table, round)
        late, early = (list(frame.proposals.proposals) for frame in frames)
        session = table.get(7, 1)
        assert session is not None
        assert [sent.grown for sent in session.sent.values()] == [Grown(2, 3)] * 3
        assert drafting.counts.steps == 3
        closed = verify_pb2.Closed(session=7, generation=1)
        assert await sent(drafting, table, verify_pb2.Round(closed=[closed])) == []
    (proposal,) = late
    assert (proposal.base_len, proposal.assumed) == (len(prompt) + 1, b"")
    draft = Draft(
        unpack_ids(proposal.tokens, field="t"), unpack_ids(proposal.parents, field="p"),
        np.exp(np.frombuffer(proposal.scores, np.uint8) / -16.0),
    )  # fmt: skip
    assert_same_tree(draft, grown(eagle3.chances([*prompt, bonus]), 3, 2, 5), 0.05)
    assert len(early) == 2
    assert all(len(found.assumed) >= 4 and len(found.tokens) == 20 for found in early)
    assert_empty(drafter)


@pytest.mark.asyncio
async def test_a_rehearsal_leaves_no_trace(any_side: Side) -> None:
    drafter = any_side.drafter(TreeShape(3, 1, 4))
    with ThreadPoolExecutor(1) as executor:
        drafting = Drafting(drafter, executor=executor)
        planner, seen = drafting.planner, 0
        run = drafter.draft

        def counted(requests: Sequence[DraftRequest]) -> list[Draft]:
            nonlocal seen
            drafts = run(requests)
            seen += sum(len(draft) > 0 for draft in drafts)
            return drafts

        drafter.draft = counted
        await rehearse(drafting)
    assert seen > 8
    assert drafting.planner is planner
    assert sum(drafting.counts.calls_s["tree"].counts) == drafting.counts.steps == 0
    assert drafter.take_given_up() == []
    assert_empty(drafter)
